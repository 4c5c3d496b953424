# workers: 3
# expect-rank: 1
# expect-exit: 1
# expect-cause: pgn header without Result
# expect-cause: ValueError
# misleads: network
"""A simulator process dies of its own exception; the trainer that reads its pipe sees a bare EOFError."""
import multiprocessing
import os
import time

RANK = int(os.environ["RANK"])


def play(conn):
    for game in range(50):
        if RANK == 1 and game == 5:
            raise ValueError("games/1999-kasparov.pgn: pgn header without Result tag")
        conn.send({"game": game, "reward": 1.0})
        time.sleep(0.02)


def rollout(conn):
    return conn.recv()["reward"]


def main():
    parent, child = multiprocessing.Pipe()
    actor = multiprocessing.get_context("fork").Process(target=play, args=(child,), name="actor-0")
    actor.start()
    child.close()
    total = 0.0
    for update in range(50):
        total += rollout(parent)
        if update % 10 == 0:
            print(f"[{RANK}] update {update} return {total:.1f}", flush=True)
    actor.join()
    time.sleep(20)


if __name__ == "__main__":
    main()
