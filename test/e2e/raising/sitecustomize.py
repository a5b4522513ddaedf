# SPDX-License-Identifier: Apache-2.0
"""What Banyan hangs into SGLang raises where a file says so: loaded by every process of a server whose ``PYTHONPATH``
begins with this folder. One line of the file is the name of a hook (``banyan.faults``)."""

import functools
import inspect
import os
from pathlib import Path

from banyan import faults

VARIABLE = "BANYAN_TEST_RAISING"


def is_to_raise(where):
    named = os.environ.get(VARIABLE)
    return named is not None and where in Path(named).read_text().split()


def raising(function, where):
    def check():
        if is_to_raise(where):
            raise RuntimeError(f"{where} was made to fail")

    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def checked(*args, **kwargs):
            check()
            async for item in function(*args, **kwargs):
                yield item

    elif inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def checked(*args, **kwargs):
            check()
            return await function(*args, **kwargs)

    else:

        @functools.wraps(function)
        def checked(*args, **kwargs):
            check()
            return function(*args, **kwargs)

    return checked


def checked_by(guarding):
    return lambda function, where, *args, **kwargs: guarding(raising(function, where), where, *args, **kwargs)


faults.quiet = checked_by(faults.quiet)
faults.around = checked_by(faults.around)
