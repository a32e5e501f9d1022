"""Messages on the ring port: limits, ids, places, versions, and statuses that are pushed."""

from __future__ import annotations

from mutants.mutant import Mutant

MESSAGES = "tests/test_messages.py"
BROKEN_OFF = f"{MESSAGES}::test_a_part_whose_bytes_do_not_come_is_broken_off"
OPENINGS = f"{MESSAGES}::test_an_opening_that_makes_no_sense_is_answered"
ANSWERS = f"{MESSAGES}::test_an_answer_that_is_none_is_told"

MUTANTS = [
    Mutant("bytes of another message count as a part", "Asked.read", "frame.epoch != self.number", "False", BROKEN_OFF),
    Mutant("a part may have more bytes than were announced", "Asked.read", "0 < n <= self.n_bytes - self._n_read", "0 < n",
           BROKEN_OFF),
    Mutant("frames of bytes have the limits of answers", "Asked.__init__", "DATA_LIMITS", "ANSWER_LIMITS",
           f"{MESSAGES}::test_a_data_frame_that_is_too_long_takes_no_memory"),
    Mutant("an answer to another message is believed", "Message.read", "frame.epoch != self.number", "False", ANSWERS),
    Mutant("a refusal in the middle of a part is not looked for", "Message.send", "self.sock.is_readable()", "False",
           f"{MESSAGES}::test_a_part_that_is_refused_in_the_middle_is_answered"),
    Mutant("a node of another version is answered", "MessageServer._answer_to", "opening.version != CONTROL_VERSION", "False",
           OPENINGS),
    Mutant("a message may announce any number of bytes", "MessageServer._answer_to", "opening.n_bytes > limit", "False",
           OPENINGS),
    Mutant("callers that know no run may take all places", "MessageServer._answer_to", "not kind.of_run", "False",
           f"{MESSAGES}::test_what_anybody_may_ask_has_few_places"),
    Mutant("any number of messages is answered at once", "MessageServer._accept", "len(self._open) < N_MESSAGES", "True",
           f"{MESSAGES}::test_messages_have_a_number_of_places"),
    Mutant("signs of life of a starter are not heard", "MessageServer._watch", "if is_signed:", "if False:",
           f"{MESSAGES}::test_who_watches_gives_signs_of_life"),
    Mutant("a silent node is watched for ever", "ControlClient.watch", "now - heard > ANSWER_S", "False",
           f"{MESSAGES}::test_a_node_that_is_silent_while_it_is_watched_is_lost"),
]  # fmt: skip
