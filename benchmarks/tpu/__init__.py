"""The TPU kernel compiled by libtpu and counted, without a TPU; `measure` runs it on one."""
