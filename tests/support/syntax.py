"""Syntax trees of sources, also while other threads parse."""

import ast
import gc


def parse(source: str) -> ast.Module:
    """`ast.parse`, without the garbage collector.

    CPython 3.11.7 counts the depth of all threads' trees in one place. A collection within a parse
    lets other threads run; if one of them parses, as it does to print a traceback, the first parse
    raises SystemError (https://github.com/python/cpython/issues/106905).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if was_enabled:
            gc.enable()
