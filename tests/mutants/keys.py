"""Keys, challenges, sealed frames, joining, signed requests."""

from __future__ import annotations

from mutants.mutant import Mutant

SEALED = "tests/security/test_sealed_frames.py"
JOIN = "tests/security/test_join.py"
CONTROL = "tests/security/test_control_with_a_key.py"
HANDMADE_SESSION = f"{SEALED}::test_keys_of_a_session_come_from_the_secret_the_cluster_key_and_both_messages"
REPLAYED = f"{CONTROL}::test_a_request_that_is_played_again_is_refused_for_as_long_as_its_nonce_is_good"
ANSWERS = f"{CONTROL}::test_a_signed_answer_belongs_to_its_request_and_covers_all_of_itself"

MUTANTS = [
    Mutant(
        "a host without the code gives a board its own cluster key",
        "shared_key",
        "salt=secret",
        "salt=None",
        f"{JOIN}::test_a_host_that_does_not_know_the_code_gives_nobody_a_key",
    ),
    Mutant(
        "the keys of a session lack the cluster key",
        "_session_keys",
        "public, secret,",
        "public, b'',",
        HANDMADE_SESSION,
    ),
    Mutant(
        "the keys of a session lack its messages", "_session_keys", "_SESSION + messages", "_SESSION", HANDMADE_SESSION
    ),
    Mutant(
        "both directions of a session have one key",
        "_session_keys",
        "made[KEY_BYTES:]",
        "made[:KEY_BYTES]",
        f"{SEALED}::test_frames_of_a_handshake_do_not_open_where_they_come_from",
    ),
    Mutant("used nonces are forgotten after a minute", "NoncesGiven.use", "2 * NONCE_S", "NONCE_S / 2", REPLAYED),
    Mutant("a nonce may be used twice", "NoncesGiven.use", "nonce in self.used", "False", REPLAYED),
    Mutant(
        "nonces are good for ever",
        "NoncesGiven.is_fresh",
        "<= NONCE_S",
        ">= 0",
        f"{CONTROL}::test_nonces_grow_old_and_strangers_leave_nothing_behind",
    ),
    Mutant(
        "the signature of an answer does not cover the next nonce",
        "sign_answer",
        "body_hash(body), next_nonce)",
        "body_hash(body))",
        f"{CONTROL}::test_who_changes_the_next_nonce_of_an_answer_is_not_believed",
    ),
    Mutant("the signature of an answer does not cover its status", "sign_answer", "str(status)", "'200'", ANSWERS),
    Mutant(
        "the signature of an answer does not say to which request it belongs",
        "sign_answer",
        "(request, str",
        "('', str",
        ANSWERS,
    ),
    Mutant("the signature of an answer does not cover its body", "sign_answer", "body_hash(body)", "''", ANSWERS),
    Mutant(
        "the client believes an answer that nobody with the key has signed",
        "ControlClient._signed",
        "not is_answer(answered, secret, signature, found.status, found.body, nonce)",
        "False",
        f"{CONTROL}::test_who_changes_the_next_nonce_of_an_answer_is_not_believed",
    ),
]
