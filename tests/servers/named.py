"""named.py HEX SCRIPT [ARG…]: runs a script of Python under a process name given as bytes.

The kernel cuts a name at 15 bytes, whatever they are: a long one in Cyrillic ends in the middle of a letter.
"""
import ctypes
import runpy
import sys

PR_SET_NAME = 15

name = bytes.fromhex(sys.argv[1])
if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NAME, name, 0, 0, 0) != 0:
    sys.exit(f"prctl: error {ctypes.get_errno()}")
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
