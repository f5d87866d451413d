"""A child process for tests that imports nothing heavy."""

import os
import time

from sqrtdk.children import answer_questions


def serve_small(connection):
    """A process that measures nothing: it answers at once, hangs, dies or raises."""

    def answer_once(name):
        if name == "hangs":
            time.sleep(600)
        if name == "dies":
            os._exit(7)
        if name == "raises":
            raise RuntimeError("out of luck")
        return {"family": name, "layers": [], "reasons": [], "process": os.getpid()}

    answer_questions(connection, answer_once)
