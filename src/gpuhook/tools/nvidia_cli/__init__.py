"""nvidia-container-cli for those who call it: ctr --gpus, Apptainer, enroot, gVisor."""
