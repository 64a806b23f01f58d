"""Devices and the time of one kernel or one message on them."""
