"""The TPU kernel compiled by libtpu and counted, without a TPU; `timed` runs it on one."""
