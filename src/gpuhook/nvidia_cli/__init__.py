"""A replacement of nvidia-container-cli for its callers: ctr --gpus, Apptainer, enroot, gVisor."""
