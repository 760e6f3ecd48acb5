"""Triton kernels and the functions that launch them, one source for all devices."""

from graphlin.backends.host.interpreter import choose_interpreter

choose_interpreter()
