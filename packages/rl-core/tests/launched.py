"""Classes that the launcher's tests start in other processes."""

import asyncio
import os
import subprocess
import sys
import time


class Counter:
    def __init__(self, start=0):
        self.value = start
        self.flag = os.environ.get("FLAG")
        self.modules = set(sys.modules)
        self.gate = asyncio.Event()

    def add(self, amount):
        time.sleep(0.01)
        self.value += amount
        return self.value

    def environment(self):
        return self.flag

    def directory(self):
        return os.getcwd()

    def imported(self, name):
        return name in self.modules

    async def wait(self):
        await self.gate.wait()
        return "opened"

    async def open(self):
        self.gate.set()

    async def forever(self):
        await asyncio.sleep(3600)

    def fail(self, error):
        raise error

    def unpicklable(self):
        class LocalError(Exception):
            pass

        raise LocalError("seen here only")

    def returns_unpicklable(self):
        return lambda: None

    def start_daemon(self):
        """A grandchild in a session of its own, orphaned at once."""
        code = (
            "import subprocess as s, sys;"
            "p = s.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'],"
            "start_new_session=True, stdout=s.DEVNULL); print(p.pid)"
        )
        return int(subprocess.check_output([sys.executable, "-c", code]))

    def say(self, text):
        sys.stdout.write(text)
        sys.stdout.flush()

    def exit(self):
        os._exit(3)


class Broken:
    def __init__(self):
        raise ValueError("cannot be built")

    def anything(self):
        return None
