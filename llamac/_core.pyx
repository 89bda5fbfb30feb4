# cython: language_level=3, binding=True, embedsignature=False, auto_pickle=False, autotestdict=False
"""The C core for Python: checks and converts arguments, calls C, turns errors into exceptions. It computes nothing.

A Model holds the buffer that it was opened over; a Session holds its Model. C calls that compute release the GIL.
csrc/llamac.h documents what they do, with shapes and units.

The module is divided among the files that are included below. Together they are one unit of compilation: their cdef
functions and classes see each other.
"""

cimport cython
from cpython.buffer cimport PyBUF_READ, PyBUF_SIMPLE, PyBUF_WRITE
from cpython.buffer cimport PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.object cimport PyObject
from cpython.pythread cimport PyThread_get_thread_ident
from cpython.ref cimport Py_CLEAR, Py_INCREF
from cpython.unicode cimport PyUnicode_AsUTF8, PyUnicode_AsUTF8AndSize, PyUnicode_DecodeUTF8
from libc.limits cimport INT_MAX
from libc.stdint cimport int32_t, uint32_t, uint64_t, uintptr_t, uint8_t
from libc.string cimport memcpy, memmove, memset

from .libllamac cimport *

from functools import partial, update_wrapper

from .arguments import to_float, to_int
from .errors import (ArgumentError, BusyError, CancelledError, ClosedError, ContextFullError, LlamacError, ModelError,
                     OutOfMemoryError, UnsupportedError)
from .interrupt import interruptible

include "_core_checks.pxi"
include "_core_memory.pxi"


# ---- the file format, this build and this machine

include "_core_tables.pxi"
include "_core_dtypes.pxi"
include "_core_measure.pxi"
include "_core_selftest.pxi"


# ---- texts

include "_core_text.pxi"


# ---- models

include "_core_device.pxi"
include "_core_model.pxi"
include "_core_plan.pxi"


# ---- operations on arrays of the caller

include "_core_sampling.pxi"
include "_core_ops.pxi"


# ---- sessions

include "_core_tokens.pxi"
include "_core_session.pxi"
include "_core_helper.pxi"
include "_core_drafter.pxi"
include "_core_saving.pxi"
include "_core_profile.pxi"
