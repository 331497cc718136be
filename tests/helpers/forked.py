"""What a call does in a forked child of this process."""

import os
import re
import signal


def told_in_fork(call, limit_s=20):
    """Text of the RuntimeError that it raises there, ``"nothing"``, or ``"hangs"``."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        told = "nothing"
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the child
            signal.alarm(limit_s)
            call()
        except RuntimeError as error:
            told = str(error)
        except BaseException as error:
            told = f"other: {error!r}"
        finally:
            os.write(writer, f"{os.getpid()} {told}".encode()[:4096])
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        told = answers.read().decode()
    os.waitpid(child, 0)
    number, _, text = told.partition(" ")
    if not told:
        return "hangs"
    names = {str(os.getpid()): "PARENT", number: "CHILD"}
    return re.sub(r"\d+", lambda found: names.get(found[0], found[0]), text)
