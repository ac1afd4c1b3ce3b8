"""What the integration tests are made of: root filesystems, bundles, engines, host snapshots."""
