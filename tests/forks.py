"""Starts Python processes as forks of one that has imported the large packages of others.

Importing torch, Lightning and what they import takes six of the seven seconds of a start. A process
of this module is the child of the process that starts it, has its own id, session, environment,
folder and output, has imported nothing of ours, and ends as Python does. In such a process, and
with `multiprocessing` in this one, other Python processes are started in the same way.
"""

import atexit
import ctypes
import importlib
import itertools
import multiprocessing.util
import os
import pickle
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
import warnings
from pathlib import Path

LARGE = (
    *("torch", "lightning.pytorch", "torchmetrics", "torchvision", "torch._dynamo"),
    *("matplotlib.pyplot", "scipy.stats", "sklearn.datasets", "jsonargparse", "torch.func"),
    *("lightning.pytorch.cli", "torch.distributed.launcher.api", "optuna", "multiprocessing.spawn"),
)
ROOT = Path(__file__).parents[1]
PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl
REAL = subprocess.Popen
_requests = None  # the socket of the process from which this one's children are forked
_one_at_a_time = threading.Lock()


def _start_server():
    """Starts the process that has imported the large packages and that forks the others."""
    global _requests
    _requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        number = theirs.fileno()
        command = [sys.executable, "-c", f"from tests.forks import main; main({number})"]
        environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        server = REAL(
            command, stdin=subprocess.DEVNULL, pass_fds=[number], cwd=ROOT, env=environment
        )

    def stop():
        _requests.close()
        server.wait()

    atexit.register(stop)


def main(number):
    """Imports the large packages and serves requests."""
    subprocess.Popen = Popen  # before others import it by name
    multiprocessing.util.spawnv_passfds = spawnv_passfds
    # multiprocessing blocks signals while it starts a process, which may be what starts this one.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in LARGE:
            importlib.import_module(name)
    _serve(socket.socket(fileno=number))


def _serve(requests):
    """Forks a process for each request until the process that sends them is gone."""
    number = requests.fileno()
    os.closerange(3, number)
    os.closerange(number + 1, 256)
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 64)
        if not request:
            os._exit(0)
        parent = os.fork()
        if not parent:
            parent = os.getpid()
            if not os.fork():
                while os.getppid() == parent:
                    pass  # the orphan becomes a child of the process that asked for it
                _become(requests, descriptors, **pickle.loads(request))
            os._exit(0)
        os.waitpid(parent, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def start(command, descriptors, cwd=None, environment=None, session=False):
    """Starts a Python process with these descriptors, by their numbers there; returns its id."""
    words = {"command": list(map(os.fspath, command)), "cwd": cwd or os.getcwd()}
    words |= {"environment": dict(environment or os.environ), "session": session}
    words["numbers"] = list(descriptors)
    with _one_at_a_time:
        if _requests is None:
            _start_server()
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(_requests, [pickle.dumps(words)], list(descriptors.values()))
            return int(_requests.recv(32))
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0)


def _become(requests, descriptors, *, command, cwd, environment, session, numbers):
    """Runs a command in this process, a fork, as in one that Python has just started."""
    status = 1
    try:
        requests.send(str(os.getpid()).encode())
        requests.close()
        _serve_own_children()
        high = [os.dup2(one, 200 + i) for i, one in enumerate(descriptors)]
        for one in descriptors:
            os.close(one)
        for one, number in zip(high, numbers, strict=True):
            os.dup2(one, number, inheritable=True)
            os.close(one)
        if session:
            os.setsid()
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        random.seed()
        sys.modules["numpy"].random.seed()
        for name, mode, number in (("stdin", "r", 0), ("stdout", "w", 1), ("stderr", "w", 2)):
            stream = open(number, mode, buffering=1 if number == 2 else -1, closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        status = _run(command)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _serve_own_children():
    global _requests
    _requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        _requests.close()
        _serve(theirs)
    theirs.close()


def _run(command):
    """Runs the arguments of Python in a new `__main__`; returns the exit status."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    how, *rest = _arguments(command)
    sys.path[0:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    status = 0
    try:
        if how == "-m":
            sys.argv = ["-m", *rest[1:]]
            sys.path.insert(0, os.getcwd())
            runpy._run_module_as_main(rest[0])
        elif how == "-c":
            sys.argv = ["-c", *rest[1:]]
            sys.path.insert(0, "")
            exec(compile(rest[0], "<string>", "exec"), vars(main))
        else:
            sys.argv = [how, *rest]
            sys.path.insert(0, os.path.dirname(os.path.abspath(how)))
            runpy.run_path(how, run_name="__main__")
    except SystemExit as error:
        status = error.code
        if status is not None and not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    return (status or 0) & 255


def _arguments(command):
    """Returns the arguments of Python without the options that make no difference to tests."""
    return list(itertools.dropwhile(lambda word: word in ("-u", "-B"), command[1:]))


def _forkable(command):
    """Whether a command is this Python with arguments that `_run` can read."""
    if sys.platform != "linux" or isinstance(command, str) or command[0] != sys.executable:
        return False
    first = os.fspath(_arguments(command)[0])
    return first in ("-c", "-m") or not first.startswith("-")


class Popen(REAL):
    """As `subprocess.Popen`; Python processes are forks."""

    def _execute_child(self, args, *more):
        executable, _, _, pass_fds, cwd, env = more[:6]
        pipes, start_new_session = more[9:15], more[20]  # private: see its definition in Python
        if executable or not _forkable(args):
            super()._execute_child(args, *more)
            return
        ends = (pipes[0], pipes[3], pipes[5])  # the child's; -1: this process's own
        descriptors = {i: i if end == -1 else end for i, end in enumerate(ends)}
        descriptors |= {number: number for number in pass_fds}
        self.pid = start(args, descriptors, cwd, env, start_new_session)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def spawnv_passfds(path, args, passfds):
    """As that of `multiprocessing.util`, which starts the processes of the method `spawn`."""
    command = [os.fsdecode(path), *map(os.fsdecode, args[1:])]
    if not _forkable(command):
        return _spawnv_passfds(path, args, passfds)
    return start(command, {number: number for number in (0, 1, 2, *passfds)})


_spawnv_passfds = multiprocessing.util.spawnv_passfds
