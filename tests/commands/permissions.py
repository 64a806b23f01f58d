"""Lets the permissions of files count for root, too, as they do for users."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

VERSION_3 = 0x20080522
OVERRIDES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Data(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]


@contextmanager
def permissions_count() -> Iterator[None]:
    """Without the capabilities by which root reads and writes every file, in this thread. Does nothing for a user who
    has none."""
    libc, header, data = ctypes.CDLL(None, use_errno=True), _Header(VERSION_3, 0), (_Data * 2)()
    assert libc.capget(ctypes.byref(header), data) == 0, ctypes.get_errno()
    effective = data[0].effective
    data[0].effective = effective & ~OVERRIDES
    assert libc.capset(ctypes.byref(header), data) == 0, ctypes.get_errno()
    try:
        yield
    finally:
        data[0].effective = effective
        libc.capset(ctypes.byref(header), data)
