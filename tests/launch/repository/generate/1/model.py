"""Answers with what came, through the response sender.

"slow" is answered once there is a file `answer-slow` in the repository; "hold" never is, and after
"hang" nothing is. Whoever has taken one of these leaves a file there, as `slow-PID`. With "die" the
process is killed while it holds all locks that it shares with the server. A file
`refuse-to-load-again` makes `initialize` raise, and `load-slowly` makes it wait for as long as that
is there.
"""

import ctypes
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from charonia.supervision.open_calls import OpenCalls

REPOSITORY = Path(__file__).parents[2]
FREE_MUTEX = re.compile(rb"\0{4}.{4}\0{8}[\x90\x91]\0{23}", re.DOTALL)
"""As the C library lays it out if it is robust and shared, recursive or not."""


def lock_all_shared():
    """Lock each mutex in the memory that this process shares with the server; how many."""
    num_locked = 0
    with open("/proc/self/maps", encoding="utf-8") as maps:
        regions = [line.split()[0].split("-") for line in maps if "/dev/shm/" in line]
    for start, end in regions:
        address = int(start, 16)
        memory = ctypes.string_at(address, int(end, 16) - address)
        for found in FREE_MUTEX.finditer(memory):
            mutex = ctypes.c_void_p(address + found.start())
            num_locked += ctypes.CDLL(None).pthread_mutex_trylock(mutex) == 0
    return num_locked


class TritonPythonModel:
    def initialize(self, args):
        if (REPOSITORY / "refuse-to-load-again").exists():
            raise RuntimeError("the stand-in refuses to load again")
        while (REPOSITORY / "load-slowly").exists():
            time.sleep(0.1)
        self.held = []
        self.open_calls = OpenCalls()

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            tensor = pb_utils.get_input_tensor_by_name(request, "text_input")
            text = np.array([b""], dtype=object) if tensor is None else tensor.as_numpy()
            if text[0] == b"hold":
                self.held.append(sender)
                self.open_calls.note(len(self.held))
            if text[0] in (b"slow", b"hold", b"hang"):
                (REPOSITORY / f"{text[0].decode()}-{os.getpid()}").touch()
            if text[0] == b"die":
                assert lock_all_shared() >= 4, "each of four message queues has one"
                os.kill(os.getpid(), signal.SIGKILL)
            if text[0] == b"hang":
                time.sleep(3600)
            while text[0] == b"slow" and not (REPOSITORY / "answer-slow").exists():
                time.sleep(0.05)
            if text[0] == b"hold":
                continue
            response = pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)])
            sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
