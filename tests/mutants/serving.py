"""Fields of requests, and who may be computed when."""

from __future__ import annotations

from mutants.mutant import Mutant

PARTS = "tests/serve/test_serve_parts.py"
FIELDS = f"{PARTS}::test_every_field_of_a_request_reaches_the_engine"
DEFAULTS = f"{PARTS}::test_fields_that_a_request_does_not_name_have_openais_defaults"
GONE = f"{PARTS}::test_who_is_let_in_and_gone_at_the_same_moment_keeps_no_place"
MEMORY = f"{PARTS}::test_nobody_is_let_in_while_texts_wait_for_memory"
ALONE = f"{PARTS}::test_a_request_for_more_texts_than_run_at_once_waits_until_it_is_alone_and_is_not_overtaken"
ORDER = f"{PARTS}::test_priority_goes_first_then_who_has_least_then_who_came_first"
FULL = f"{PARTS}::test_a_full_queue_refuses_and_who_leaves_it_makes_way"

MUTANTS = [
    Mutant(
        "min_p is ignored by the API",
        "serve.request:_sampling",
        "for name in SamplingFields.__struct_fields__",
        "for name in SamplingFields.__struct_fields__ if name != 'min_p'",
        FIELDS,
    ),
    Mutant(
        "presence_penalty is ignored by the API",
        "serve.request:_sampling",
        "for name in SamplingFields.__struct_fields__",
        "for name in SamplingFields.__struct_fields__ if name != 'presence_penalty'",
        FIELDS,
    ),
    Mutant(
        "frequency_penalty is ignored by the API",
        "serve.request:_sampling",
        "for name in SamplingFields.__struct_fields__",
        "for name in SamplingFields.__struct_fields__ if name != 'frequency_penalty'",
        FIELDS,
    ),
    Mutant(
        "top_p is ignored by the API",
        "serve.request:_sampling",
        "for name in SamplingFields.__struct_fields__",
        "for name in SamplingFields.__struct_fields__ if name != 'top_p'",
        FIELDS,
    ),
    Mutant(
        "the seed of a request is ignored",
        "serve.request:_sampling",
        "secrets.randbits(63) if seed is None else seed",
        "secrets.randbits(63)",
        FIELDS,
    ),
    Mutant(
        "a top_k of 0 leaves no token",
        "serve.request:_sampling",
        "if fields.top_k > 0",
        "if fields.top_k >= 0",
        DEFAULTS,
    ),
    Mutant(
        "texts of the API do not end at the model's own end",
        "Outlet.submit",
        "eos_ids=self._codec.eos_ids",
        "eos_ids=frozenset()",
        FIELDS,
    ),
    Mutant(
        "who is let in and leaves keeps a place for ever", "Admission._enter", "self._leave(owner, n)", "pass", GONE
    ),
    Mutant("texts are let in while others wait for memory", "Admission._fits", "self._is_open()", "True", MEMORY),
    Mutant("more texts run than allowed", "Admission._fits", "<= self.max_running", "<= self.max_running + 1", ORDER),
    Mutant("a request for many texts is never let in", "Admission._fits", "or self.n_running == 0", "or False", ALONE),
    Mutant(
        "who comes later overtakes who waits",
        "Admission._enter",
        "not self._waiters and self._fits(n)",
        "self._fits(n)",
        ALONE,
    ),
    Mutant("the last in the queue goes first", "Admission.admit", "w.number", "-w.number", ORDER),
    Mutant("priority is turned round", "Admission.admit", "-w.priority", "w.priority", ORDER),
    Mutant(
        "who has most texts gets more",
        "Admission.admit",
        "self._running[w.owner], w.number",
        "-self._running[w.owner], w.number",
        ORDER,
    ),
    Mutant("the queue has no end", "Admission._enter", "self.n_waiting + n > self.max_waiting", "False", FULL),
    Mutant("who leaves lets nobody in", "Admission._leave", "self.admit()", "pass", ALONE),
]
