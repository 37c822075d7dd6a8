"""A student trained by megatron-core, one rank per process; any device, nccl or gloo."""
