"""Parts of the integration tests: root filesystems, bundles, engines, host snapshots."""
