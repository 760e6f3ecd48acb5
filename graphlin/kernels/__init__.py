"""Triton kernels and the functions that launch them, one source for all devices."""

from graphlin.backends.interpreter import choose_interpreter

choose_interpreter()
