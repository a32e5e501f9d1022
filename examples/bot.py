#!/usr/bin/env python3
"""A bot that answers in the rooms of a chat network, and remembers the last messages of each room.

The network is one of this process, with the three calls that most have: wait for messages, send one, and say that one types.
Replace Network by your network's library.
"""

from collections import defaultdict, deque

from api import chat, parser


class Network:
    """A network that has a few messages, and then ends."""

    def __init__(self, messages: list[tuple[str, str]]) -> None:
        self.messages = messages

    def receive(self):
        yield from self.messages

    def show_typing(self, room: str) -> None:
        print(f"[{room}] ...", flush=True)

    def send(self, room: str, text: str) -> None:
        print(f"[{room}] bot: {text}", flush=True)


def run_bot(network: Network, server: str, max_tokens: int) -> None:
    rooms = defaultdict(lambda: deque(maxlen=8))
    for room, text in network.receive():
        network.show_typing(room)
        rooms[room].append({"role": "user", "content": text})
        answer = chat(server, list(rooms[room]), max_tokens=max_tokens)["content"] or ""
        rooms[room].append({"role": "assistant", "content": answer})
        network.send(room, answer.strip())


if __name__ == "__main__":
    args = parser(__doc__).parse_args()
    talk = [("garden", "Good morrow!"), ("street", "Who goes there?"), ("garden", "Speak again, bright angel.")]
    run_bot(Network(talk), args.server, args.max_tokens)
