"""hostile.py WHAT …: what a neighbour, or a server's own code, does to `wakeone`. It keeps at it until it is killed.

  network         a worker without capabilities opens a UDP socket in a network of its own, with options that only root
                  may set, and asks the broker for a queue beside it
  hoard         a worker begins many groups, and then is given queues that it never takes; another worker asks honestly
  flood NAME N    N connections to the broker of that name, each opened again when it is closed
  frozen PORT     waits in poll, with a set in a page that nobody fills (userfaultfd); two listeners
  page            says the address of such a page
  epoll [PORT]    waits in epoll_wait, which writes its events to such a page; says the number of the instance
  exec            executes a program, and never gets to it: it has a file open whose close nobody answers (FUSE); says the
                  process
  worker          a worker of `run`: that of slot 0 does as `epoll` does, the others serve
  listen PORT     two plain listeners of one address
"""
import ctypes
import fcntl
import mmap
import os
import select
import socket
import stat
import struct
import subprocess
import sys
import threading
import time

NOBODY = 65534
CLAIM, BY_RECEIVING = 1, 3


def say(text):
    print(text, file=sys.stderr, flush=True)


def rest():
    while True:
        time.sleep(60)


def ask(fd):
    """Asks as the library would; the kind of the broker's answer, and the descriptors that came with it."""
    name, token = os.environ["WAKEONE_SPLIT"].split(":")
    broker = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    broker.connect("\0" + name)
    request = struct.pack("=IHH16siI", 0x6B61572E, 2, CLAIM, bytes.fromhex(token), fd, BY_RECEIVING)
    socket.send_fds(broker, [request], [fd])
    answer, given, _, _ = socket.recv_fds(broker, 8, 1)
    return broker, struct.unpack("=IHH", answer)[2] if answer else None, given


def elsewhere(channel):
    """In a network of our own we are root."""
    own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    own.setsockopt(socket.SOL_SOCKET, 36, 7)  # SO_MARK
    own.setsockopt(socket.IPPROTO_IP, 19, 1)  # IP_TRANSPARENT
    own.bind(("0.0.0.0", 443))
    channel = socket.socket(fileno=channel)
    socket.send_fds(channel, [b"x"], [own.fileno()])
    rest()


def network():
    with open(__file__) as file:
        text = file.read()
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    here, there = socket.socketpair()
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    other = ["unshare", "-Urn", "python3", "-c", text, "elsewhere", str(there.fileno())]
    subprocess.Popen(other, pass_fds=[there.fileno()], env=environment)
    _, (shared, *_), _, _ = socket.recv_fds(here, 1, 1)
    if os.fork() == 0:
        answer = ask(shared)
        say(f"asked: {answer[1]}")
        rest()
    rest()


def hoard():
    shared = []
    for at in range(64):
        own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        own.bind(("127.0.0.1", 20000 + at))
        own.setblocking(False)
        shared.append(own)
    hoarded, tell = os.pipe()
    if os.fork() == 0:
        for own in shared:
            broker, _, given = ask(own.fileno())
            broker.close()
            os.close(*given)
        hold = []
        try:
            for _ in range(256):
                broker, _, given = ask(shared[0].fileno())
                hold.append(broker)
                os.close(*given)
        except (OSError, TypeError):
            pass  # the broker has no descriptors left
        os.write(tell, b"x")
        rest()
    if os.fork() == 0:
        os.read(hoarded, 1)
        own = shared[1]
        before = os.fstat(own.fileno()).st_ino
        try:
            own.recv(1)
        except BlockingIOError:
            pass
        after = os.fstat(own.fileno()).st_ino
        say("honest: " + ("a queue of its own" if after != before else "the shared socket"))
        rest()
    rest()


def flood(name, count):
    connections = []

    def connect():
        one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            one.connect("\0" + name)
        except OSError:
            rest()  # the broker is gone
        connections.append(one)

    for _ in range(count):
        connect()
    print("flooded", flush=True)
    while True:
        closed, _, _ = select.select(connections, [], [], 1)
        for one in closed:
            connections.remove(one)
            one.close()
            connect()


def pair(port):
    both = []
    for _ in range(2):
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        own.bind(("127.0.0.1", port))
        own.listen(8)
        port = own.getsockname()[1]
        both.append(own)
    return both


def page_of_faults():
    """A page in memory, its address, and how to have it registered: from then on who misses it waits for us."""
    libc = ctypes.CDLL(None, use_errno=True)
    userfaultfd = {"x86_64": 323, "aarch64": 282}[os.uname().machine]
    faults = libc.syscall(userfaultfd, os.O_CLOEXEC)
    fcntl.ioctl(faults, 0xC018AA3F, bytearray(struct.pack("QQQ", 0xAA, 0, 0)))  # UFFDIO_API
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    at = ctypes.addressof(ctypes.c_char.from_buffer(page))

    def register():
        missing = bytearray(struct.pack("QQQQ", at, mmap.PAGESIZE, 1, 0))
        fcntl.ioctl(faults, 0xC020AA00, missing)  # UFFDIO_REGISTER

    return libc, page, at, register


def page():
    _, _, at, register = page_of_faults()
    register()
    print(at, flush=True)
    rest()


def frozen(port):
    both = pair(port)
    libc, page, at, register = page_of_faults()
    for place, own in enumerate(both):
        struct.pack_into("ihh", page, 8 * place, own.fileno(), select.POLLIN, 0)
    register()
    wait = threading.Thread(target=libc.poll, args=(ctypes.c_void_p(at), 2, -1), daemon=True)
    wait.start()
    time.sleep(0.3)
    # The set was read when poll() began; now whoever looks at it waits for us.
    libc.madvise(ctypes.c_void_p(at), mmap.PAGESIZE, 4)
    print("frozen", flush=True)
    rest()


def lock_instance(listeners):
    """An epoll instance with these listeners, locked: the kernel writes an event to a page that nobody fills."""
    libc, _, at, register = page_of_faults()
    instance = select.epoll()
    for own in listeners:
        instance.register(own, select.EPOLLIN)
    ready, other = socket.socketpair()
    other.send(b"x")
    instance.register(ready, select.EPOLLIN)
    register()
    wait = threading.Thread(
        target=libc.epoll_wait, args=(instance.fileno(), ctypes.c_void_p(at), 8, -1), daemon=True
    )
    wait.start()
    time.sleep(0.3)
    return instance, ready, other


def epoll(port):
    both = pair(port)
    kept = lock_instance(both)
    print(kept[0].fileno(), flush=True)
    rest()


def worker():
    own = socket.socket(fileno=3)
    if os.environ["WAKEONE_SLOT"] == "0":
        kept = lock_instance([own])
        say(f"locked: {kept[0].fileno()}")
        rest()
    while True:
        connection, _ = own.accept()
        connection.sendall(b"served")
        connection.close()


FUSE = {"lookup": 1, "open": 14, "read": 15, "flush": 25, "init": 26, "getattr": 3, "release": 18}


def file_nobody_closes():
    """Mounts a FUSE file system that is one file, and answers all but its flush. Its path, and the channel."""
    libc = ctypes.CDLL(None, use_errno=True)

    def mount(*what):
        if libc.mount(*what):
            raise OSError(ctypes.get_errno(), "mount")

    if libc.unshare(0x20000):  # CLONE_NEWNS
        raise OSError(ctypes.get_errno(), "unshare")
    mount(b"none", b"/", None, 0x44000, None)  # MS_REC | MS_PRIVATE
    mount(b"tmpfs", b"/mnt", b"tmpfs", 0, None)
    os.mknod("/mnt/fuse", 0o600 | stat.S_IFCHR, os.makedev(10, 229))
    channel = os.open("/mnt/fuse", os.O_RDWR)
    path = "/mnt/file"
    open(path, "w").close()
    options = f"fd={channel},rootmode=100000,user_id=0,group_id=0".encode()
    mount(b"fuse", path.encode(), b"fuse", 6, options)

    def answer():
        while True:
            request = os.read(channel, 1 << 17)
            _, what, unique = struct.unpack_from("<IIQ", request)
            attributes = struct.pack("<6Q10I", 1, 1, 1, 0, 0, 0, 0, 0, 0, 0o100666, 1, 0, 0, 0, 4096, 0)
            known = {
                FUSE["init"]: struct.pack("<4I2H2I", 7, 31, 0, 0, 12, 10, 4096, 1).ljust(64, b"\0"),
                FUSE["getattr"]: struct.pack("<Q2I", 3600, 0, 0) + attributes,
                FUSE["open"]: struct.pack("<Q2I", 1, 0, 0),
            }
            if what in known:
                body = known[what]
                os.write(channel, struct.pack("<IiQ", 16 + len(body), 0, unique) + body)
            elif what != FUSE["flush"]:
                os.write(channel, struct.pack("<IiQ", 16, -38, unique))

    threading.Thread(target=answer, daemon=True).start()
    return path, channel


def never_executes():
    path, channel = file_nobody_closes()
    process = os.fork()
    if process == 0:
        os.close(channel)  # so that all ends with the first process
        os.fstat(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        os.execv("/bin/true", ["true"])
    time.sleep(0.3)
    print(process, flush=True)
    rest()


def listen(port):
    for own in pair(port):
        threading.Thread(target=own.accept, daemon=True).start()
    print("listening", flush=True)
    rest()


if __name__ == "__main__":
    what, arguments = sys.argv[1], sys.argv[2:]
    if what == "network":
        network()
    elif what == "elsewhere":
        elsewhere(int(arguments[0]))
    elif what == "hoard":
        hoard()
    elif what == "flood":
        flood(arguments[0], int(arguments[1]))
    elif what == "page":
        page()
    elif what == "epoll":
        epoll(int(arguments[0]) if arguments else 0)
    elif what == "worker":
        worker()
    elif what == "exec":
        never_executes()
    elif what == "frozen":
        frozen(int(arguments[0]))
    else:
        listen(int(arguments[0]))
