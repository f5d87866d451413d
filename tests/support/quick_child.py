"""Child process for tests that imports nothing heavy."""

import os
import time

from sqrtdk.children import answer_questions


def serve_small(connection):
    """Answer at once, hang, die or raise, as asked, without measuring anything."""

    def answer_once(name):
        if name == "hangs":
            time.sleep(600)
        if name == "dies":
            os._exit(7)
        if name == "raises":
            raise RuntimeError("out of luck")
        return {"family": name, "layers": [], "reasons": [], "process": os.getpid()}

    answer_questions(connection, answer_once)
