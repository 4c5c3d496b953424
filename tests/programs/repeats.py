"""Relay the frames of a node to its coordinator, and repeat those of one type without end once one has passed.

``repeats.py session TYPE SIGN`` is the ForceCommand of an sshd; ``repeats.py port TYPE SIGN LISTEN HOST PORT`` is called
instead of HOST:PORT; ``repeats.py step TYPE SIGN COMMAND`` runs the task of an srun, whose agent calls it. SIGN is a file that is made when the repeating begins. Other frames still pass in between.
"""

import os
import re
import select
import socket
import struct
import subprocess
import sys
import threading

HEADER = struct.Struct(">BII")
GREETING = re.compile(rb"\ndistlaunch-agent [^\n]*\n")
COPIES = 200


def relay(source: int, sink: int, kind: str, sign: str, *, greets: bool) -> None:
    """Pass on what comes from one descriptor to another; frames of ``kind`` again and again."""
    buffer, copies = b"", b""
    while True:
        if not copies or select.select([source], [], [], 0)[0]:
            data = os.read(source, 1 << 16)
            if not data:
                return
            buffer += data
        if greets:
            found = GREETING.search(buffer)
            if found is None:
                continue
            write(sink, buffer[: found.end()])
            buffer, greets = buffer[found.end() :], False
        while len(buffer) >= HEADER.size:
            _, body, raw = HEADER.unpack_from(buffer)
            end = HEADER.size + body + raw
            if len(buffer) < end:
                break
            frame, buffer = buffer[:end], buffer[end:]
            if not copies and frame[HEADER.size :].startswith(b'{"t":"%s"' % kind.encode()):
                copies = frame * COPIES
                open(sign, "a").close()  # a node that was dropped may be called again
            write(sink, frame)
        write(sink, copies)


def write(sink: int, data: bytes) -> None:
    while data:
        data = data[os.write(sink, data) :]


def copy(source: int, sink: int, shut) -> None:
    try:
        while data := os.read(source, 1 << 16):
            write(sink, data)
    except OSError:
        pass
    shut()


def session(kind: str, sign: str) -> None:
    agent = subprocess.Popen(
        ["/bin/sh", "-c", os.environ["SSH_ORIGINAL_COMMAND"]], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    threading.Thread(target=copy, args=(0, agent.stdin.fileno(), agent.stdin.close), daemon=True).start()
    try:
        relay(agent.stdout.fileno(), 1, kind, sign, greets=True)
    except OSError:
        pass
    agent.terminate()
    agent.wait()


def port(kind: str, sign: str, listen: str, host: str, to: str) -> None:
    listening = socket.create_server(("127.0.0.1", int(listen)))
    print("up", flush=True)
    threading.Thread(target=end_with_stdin, daemon=True).start()
    accept(listening, kind, sign, host, to)


def step(kind: str, sign: str, *command: str) -> None:
    words = [*command]
    addresses = words.index("distlaunch") + 3  # after COUNT and the stub
    listening = socket.create_server(("127.0.0.1", 0))
    to = words[addresses + 1]
    words[addresses : addresses + 2] = "127.0.0.1", str(listening.getsockname()[1])
    threading.Thread(target=accept, args=(listening, kind, sign, "127.0.0.1", to), daemon=True).start()
    sys.exit(subprocess.call(words))


def accept(listening: socket.socket, kind: str, sign: str, host: str, to: str) -> None:
    while True:
        caller, _ = listening.accept()
        threading.Thread(target=serve, args=(caller, kind, sign, host, int(to)), daemon=True).start()


def end_with_stdin() -> None:
    os.read(0, 1)
    os._exit(0)


def serve(caller: socket.socket, kind: str, sign: str, host: str, to: int) -> None:
    try:
        called = socket.create_connection((host, to))
    except OSError:
        caller.close()
        return

    def end() -> None:
        for one in (caller, called):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    threading.Thread(target=copy, args=(called.fileno(), caller.fileno(), end), daemon=True).start()
    try:
        relay(caller.fileno(), called.fileno(), kind, sign, greets=False)
    except OSError:
        pass
    end()


{"session": session, "port": port, "step": step}[sys.argv[1]](*sys.argv[2:])
