import functools
import io
import json
import logging

import pytest
import sentencepiece
import tokenizers
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from mdi.errors import CheckpointError, UsageError
from mdi.spec.prompts import read_prompts
from mdi.text.styles import known_styles, style_of_model
from mdi.text.texts import Detokenizer, StopMatcher, TextCodec, resolve_prompt_style

CORPUS = [
    "Who are you? I am the ghost of the house, and  this is a house of   ghosts.\n\n\tHow now!",
    "What shall we do with the drunken sailor, early in the morning? Tell us, friends, tell us.",
    "あいうえおあいうあいえおういあえあいうえおこんにちは世界、日本語のテキストです。",
    "Größe, naïve café, ångström; Ελληνικά και русский текст. 🙂🙂👩‍👩‍👧🙃 e\u0301 \ufffd",
] * 4
CASES = ("byte_level", "llama", "metaspace", "spm", "spm_tight")


def byte_level(folder, special=("<|endoftext|>", "<|eot_id|>"), config=None, post=None):
    """As GPT-2's and Llama 3's: no pre-splitting, so that tokens begin and end within characters."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if post:
        tokenizer.post_processor = post(tokenizer)
    save(folder, tokenizer, {"eos_token": special[0], **(config or {})})


def llama(folder, decoder="sequence"):
    """As Llama 2's: blanks are U+2581, one is put in front, and what has no token is spelled in bytes."""
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581"]
    vocab += [c for c in "abcdefghijklmnoprstuwyAHIQTW.,?!\nöéあい🙂\ufffd" if c not in vocab]
    merges = [("\u2581", c) for c in "athswig"] + [("h", "o"), ("o", "u"), ("\u2581", "\u2581"), ("t", "h")]
    vocab += [a + b for a, b in merges]
    ids = {token: i for i, token in enumerate(vocab)}
    tokenizer = tokenizers.Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    if decoder == "sequence":
        parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    else:
        parts = [decoders.ByteFallback(), decoders.Metaspace()]
    tokenizer.decoder = decoders.Sequence(parts)
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    save(folder, tokenizer, config)


def spm(folder, tight=False, config=True, **options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in CORPUS for line in text.split("\n") if line.strip()),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        hard_vocab_limit=False,
        byte_fallback=True,
        character_coverage=0.98,
        remove_extra_whitespaces=tight,
        normalization_rule_name="nmt_nfkc" if tight else "identity",
        minloglevel=2,
        **options,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    if config:
        write_json(folder / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True})


def save(folder, tokenizer, config):
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", config)


def write_json(path, data):
    path.write_text(json.dumps(data), encoding="utf-8")


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    byte_level(root / "byte_level")
    llama(root / "llama")
    llama(root / "metaspace", decoder="metaspace")
    spm(root / "spm")
    spm(root / "spm_tight", tight=True)
    return {name: root / name for name in CASES}


@pytest.fixture(scope="session")
def codecs(folders):
    return {name: TextCodec.from_checkpoint(folder) for name, folder in folders.items()}


@pytest.fixture(params=CASES)
def codec(request, codecs):
    return codecs[request.param]


# ---- codec


@pytest.mark.parametrize("name", ["byte_level", "llama", "metaspace", "spm"])
def test_the_bytes_of_tokens_are_those_of_the_text(codecs, name):
    text = "a né 🙂\n日 x\ufffd"
    ids = codecs[name].encode(text)
    ids = ids[codecs[name].decode(ids[:1]) == "" :]  # without what begins a text
    data = [codecs[name].token_bytes(i) for i in ids]
    assert b"".join(data).decode().lstrip() == text and any(len(one) == 1 and one[0] >= 0x80 for one in data)
    assert [codecs[name].token_bytes(i) for i in (*codecs[name].eos_ids, 10**6)] == [b""] * (
        1 + len(codecs[name].eos_ids)
    )


@pytest.mark.parametrize("text", ["Who are you?", " two  blanks ", "\n\n", "日本語 🙂 é", "x"])
@pytest.mark.parametrize("name", ["byte_level", "llama", "spm"])
def test_text_survives_encoding(codecs, name, text):
    ids = codecs[name].encode(text)
    assert codecs[name].decode(ids) == text
    assert all(isinstance(i, int) and 0 <= i < codecs[name].vocab_size for i in ids)


def test_an_empty_text_is_the_beginning_of_text_or_nothing(codecs):
    assert codecs["byte_level"].encode("") == []
    assert codecs["llama"].encode("") == [1]
    assert codecs["spm"].encode("") == [1]
    assert all(c.decode([]) == "" for c in codecs.values())


def test_a_continuation_keeps_its_first_blank(codecs):
    for name in ("llama", "metaspace", "spm", "spm_tight"):
        codec = codecs[name]
        ids = codec.encode("ho")[1:]
        assert codec.decode(ids) == "ho"
        assert codec.decode(ids, continues=True) == " ho"
    assert codecs["byte_level"].decode(codecs["byte_level"].encode(" ho")) == " ho"


@pytest.mark.parametrize("build", [byte_level, llama, spm])
def test_agrees_with_litgpt(tmp_path, build):
    from litgpt.tokenizer import Tokenizer

    build(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **config})
    codec, reference = TextCodec.from_checkpoint(tmp_path), Tokenizer(tmp_path)
    for text in ("", "Who are you?", " \n the  house", "\u65e5\u672c \U0001f643"):
        ids = reference.encode(text)
        assert codec.encode(text) == ids.tolist()
        assert codec.decode(ids.tolist()) == reference.decode(ids)


def test_a_sentencepiece_model_without_special_ids(tmp_path):
    spm(tmp_path, bos_id=-1, eos_id=-1)
    codec = TextCodec.from_checkpoint(tmp_path)
    assert codec.eos_ids == frozenset()
    assert codec.encode("") == []
    assert codec.decode(codec.encode("the house")) == "the house"


def test_special_and_unknown_ids_are_no_text(codec):
    ids = codec.encode("the house")
    noisy = [i for pair in zip(ids, [10**6] * len(ids), strict=True) for i in pair] + [*codec.eos_ids, -1]
    assert codec.decode(noisy) == codec.decode(ids) == "the house"


def test_surrogates_are_refused(codec):
    with pytest.raises(UsageError) as caught:
        codec.encode("ab\udcff")
    assert caught.value.code == "unreadable"


def test_a_folder_without_tokenizer(tmp_path):
    with pytest.raises(CheckpointError) as e:
        TextCodec.from_checkpoint(tmp_path)
    assert "tokenizer.json or tokenizer.model" in str(e.value)
    with pytest.raises(CheckpointError) as e:
        TextCodec.from_checkpoint(tmp_path / "a" / "b")
    assert str(tmp_path / "a" / "b") in str(e.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
@pytest.mark.parametrize("content", [b"", b"{}", b'{"model": {"type": "BPE"}', b"\x00\xff" * 50])
def test_a_damaged_tokenizer(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError) as e:
        TextCodec.from_checkpoint(tmp_path)
    assert name in str(e.value)
    assert "\n" not in str(e.value)


def test_an_id_far_beyond_all_others(tmp_path):
    """Lists of all ids are made here and there."""
    byte_level(tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    for far, is_known in ((1 << 22) - 1, True), (1 << 22, False), (4_294_967_290, False):
        data["model"]["vocab"]["far"] = far
        write_json(tmp_path / "tokenizer.json", data)
        if is_known:
            assert TextCodec.from_checkpoint(tmp_path).vocab_size == far + 1
        else:
            with pytest.raises(CheckpointError, match=str(far)):
                TextCodec.from_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"[1]", b"nonsense", b"\xff\xfe"])
def test_a_damaged_file_beside_the_tokenizer(tmp_path, name, content):
    byte_level(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError) as e:
        TextCodec.from_checkpoint(tmp_path)
    assert name in str(e.value)


def test_a_config_that_names_no_class_or_an_unknown_token(tmp_path):
    byte_level(tmp_path)
    for extra in ({}, {"tokenizer_class": None}, {"tokenizer_class": "GPT2Tokenizer"}):
        write_json(tmp_path / "tokenizer_config.json", {"eos_token": "<|endoftext|>", **extra})
        codec = TextCodec.from_checkpoint(tmp_path)
        assert codec.eos_ids == {0}
        assert codec.decode(codec.encode("the house")) == "the house"
    (tmp_path / "tokenizer_config.json").unlink()
    assert TextCodec.from_checkpoint(tmp_path).eos_ids == frozenset()
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "<none>"})
    with pytest.raises(CheckpointError) as e:
        TextCodec.from_checkpoint(tmp_path)
    assert "<none>" in str(e.value)


@pytest.mark.parametrize("listed, expected", [(7, {0, 7}), ([7, 8], {0, 7, 8}), (None, {0}), ([], {0}), ("x", {0})])
def test_eos_ids_are_those_of_both_files(tmp_path, listed, expected):
    byte_level(tmp_path)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": listed})
    assert TextCodec.from_checkpoint(tmp_path).eos_ids == expected


@pytest.mark.parametrize("listed, expected", [([9, 7, 7], (7, 9)), (None, ()), ([-1, True, "x"], ()), ({}, ())])
def test_what_the_generation_config_suppresses(tmp_path, listed, expected):
    byte_level(tmp_path)
    write_json(tmp_path / "generation_config.json", {"suppress_tokens": listed})
    assert TextCodec.from_checkpoint(tmp_path).suppressed == expected


def test_eos_ids_of_generation_config_alone(tmp_path):
    byte_level(tmp_path / "json")
    write_json(tmp_path / "json" / "tokenizer_config.json", {})
    write_json(tmp_path / "json" / "generation_config.json", {"eos_token_id": [5, 6]})
    codec = TextCodec.from_checkpoint(tmp_path / "json", prompt_style="alpaca")
    assert codec.eos_ids == {5, 6}
    assert codec.stop_sequences == []
    spm(tmp_path / "spm", config=False)
    write_json(tmp_path / "spm" / "generation_config.json", {"eos_token_id": [9]})
    assert TextCodec.from_checkpoint(tmp_path / "spm").eos_ids == {2, 9}


@pytest.mark.parametrize("text", ['{\n  "eos_token_id": [3, 4],\n}', '{\n  "top_k": 5\n  "eos_token_id": [3, 4]\n}'])
def test_a_generation_config_with_a_comma_too_many_or_too_few(tmp_path, text):
    byte_level(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    assert TextCodec.from_checkpoint(tmp_path).eos_ids == {0, 3, 4}


@pytest.mark.parametrize("blanks", ["\n", ", \n", " "])
def test_a_generation_config_of_many_blanks(tmp_path, blanks):
    """If each was looked at from each other one, this would take minutes."""
    byte_level(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"a": 1' + blanks * 200_000)
    with pytest.raises(CheckpointError, match="generation_config.json"):
        TextCodec.from_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text(
        '{"a": 1,' + "\n" * 9999 + '"eos_token_id": 3' + "\n" * 9999 + '"b": 2}'
    )
    assert TextCodec.from_checkpoint(tmp_path).eos_ids == {0, 3}


def begin_with_eot(tokenizer):
    return processors.TemplateProcessing("<|eot_id|> $A", special_tokens=[("<|eot_id|>", 1)])


def test_beginning_of_text_as_the_tokenizer_puts_it_whatever_the_folder_is_called(tmp_path):
    byte_level(tmp_path, post=begin_with_eot, config={"bos_token": "<|eot_id|>"})
    assert TextCodec.from_checkpoint(tmp_path).encode("the")[0] == 1
    byte_level(tmp_path, post=begin_with_eot, config={"bos_token": "<|eot_id|>", "add_bos_token": False})
    assert 1 not in TextCodec.from_checkpoint(tmp_path).encode("the")
    byte_level(tmp_path, config={"add_bos_token": True})
    assert TextCodec.from_checkpoint(tmp_path).encode("") == []


def test_a_style_that_writes_the_beginning_of_text_does_not_double_it(tmp_path):
    special = ("<|endoftext|>", "<|begin_of_text|>", "<|eot_id|>")
    byte_level(tmp_path, special, {"bos_token": "<|begin_of_text|>", "add_bos_token": True}, begin_of_text)
    codec = TextCodec.from_checkpoint(tmp_path, "llama3")
    ids = codec.encode_prompt("the")
    assert ids[0] == 1 and 1 not in ids[1:]
    assert codec.stop_sequences == [[2]]


def begin_of_text(tokenizer):
    return processors.TemplateProcessing("<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 1)])


def test_settings_left_in_the_tokenizer_do_not_cut_prompts(tmp_path):
    byte_level(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = TextCodec.from_checkpoint(tmp_path)
    assert codec.decode(codec.encode("xyz" * 20)) == "xyz" * 20
    assert len(codec.encode("the")) <= 3


def test_vocab_size_counts_added_tokens(folders, codecs):
    llama = tokenizers.Tokenizer.from_file(str(folders["llama"] / "tokenizer.json"))
    assert codecs["llama"].vocab_size == llama.get_vocab_size(with_added_tokens=True)
    spm = sentencepiece.SentencePieceProcessor(model_file=str(folders["spm"] / "tokenizer.model"))
    assert codecs["spm"].vocab_size == spm.vocab_size()


# ---- prompt styles


def style_name(*args):
    style = resolve_prompt_style(*args)
    return None if style is None else style.class_name


def test_auto_goes_by_the_name_of_the_model(tmp_path):
    for name, expected in [
        ("Llama-3.2-1B-Instruct", "Llama3"),
        ("tiny-llama-1.1b-chat", "TinyLlama"),
        ("Qwen2.5-0.5B-Instruct", "Qwen2_5"),
        ("Qwen3-0.6B", "Qwen3"),
        ("OLMo-7B-Instruct-hf", "OLMo"),
        ("CodeLlama-7b-Instruct-hf", "CodeLlama"),
        ("nano-llama", None),
        ("", None),
        ("pythia-14m", None),
        ("Llama-3.2-1B", None),
        ("Qwen2.5-0.5B", None),
        ("Qwen2.5-Math-1.5B", None),
        ("Qwen3-0.6B-Base", None),
        ("OLMo-1B-hf", None),
        ("CodeLlama-7b-hf", None),
    ]:
        assert style_name("auto", tmp_path, name) == expected, name
        assert style_name("none", tmp_path, name) is None


def test_every_style_writes_as_litgpts():
    from litgpt import prompts

    class Recording:
        eos_id = None

        def token_to_id(self, token):
            return token

    classes = {
        c.__name__: c for c in vars(prompts).values() if isinstance(c, type) and issubclass(c, prompts.PromptStyle)
    }
    for own in ("PromptStyle", "Default"):
        del classes[own]
    assert {style.class_name for style in known_styles().values()} == classes.keys()
    assert set(prompts.prompt_styles) <= known_styles().keys()
    talk = [
        {"role": "user", "content": "a {prompt}"},
        {"role": "assistant", "content": " b\n"},
        {"role": "user", "content": "c"},
    ]
    for name, style in known_styles().items():
        theirs = prompts.prompt_styles.get(name, classes[style.class_name])()
        assert type(theirs).__name__ == style.class_name
        assert style.apply("a {prompt} b") == theirs.apply("a {prompt} b")
        assert style.stop_tokens(Recording()) == [ids for ids in theirs.stop_tokens(Recording()) if ids != [None]]
        if style.knows_conversations:
            assert style.apply(talk) == theirs.apply(talk)


def test_the_style_of_every_named_model_is_litgpts():
    from litgpt import prompts
    from litgpt.config import name_to_config

    for name in name_to_config:
        style = style_of_model(name)
        assert (style.class_name if style else "Default") == type(prompts.model_name_to_prompt_style(name)).__name__, (
            name
        )


def test_named_styles(tmp_path):
    assert style_name("alpaca", tmp_path, "") == "Alpaca"
    assert style_name("Llama3", tmp_path, "") == "Llama3"
    assert style_name("r1base", tmp_path, "") == "R1Base"
    with pytest.raises(UsageError) as caught:
        resolve_prompt_style("klingon", tmp_path, "")
    assert caught.value.code == "style"


@pytest.mark.parametrize(
    "class_path, expected",
    [("litgpt.prompts.Alpaca", "Alpaca"), ("lit_gpt.prompts.Llama3", "Llama3"), ("litgpt.prompts.Default", None)],
)
def test_the_checkpoints_own_style_comes_first(tmp_path, class_path, expected):
    (tmp_path / "prompt_style.yaml").write_text(yaml.safe_dump({"class_path": class_path}))
    assert style_name("auto", tmp_path, "Llama-3.2-1B-Instruct") == expected
    assert style_name("phi-2", tmp_path, "") == "Phi2"
    assert style_name("none", tmp_path, "") is None


@pytest.mark.parametrize(
    "class_path", ["evil.Alpaca", "litgpt.prompts.PromptStyle", "litgpt.prompts.importlib", "os.system"]
)
def test_nothing_that_a_checkpoint_names_is_imported(tmp_path, monkeypatch, class_path):
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "prompt_style.yaml").write_text(yaml.safe_dump({"class_path": class_path}))
    with pytest.raises(UsageError) as caught:
        resolve_prompt_style("auto", tmp_path, "")
    assert caught.value.code == "style"


@pytest.mark.parametrize(
    "content", ["", "- 1", "class_path: 3", "a: [", "!!python/object:os.system {}", "class_path: \xff"]
)
def test_a_damaged_style_file(tmp_path, content):
    (tmp_path / "prompt_style.yaml").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError) as e:
        resolve_prompt_style("auto", tmp_path, "")
    assert "prompt_style.yaml" in str(e.value)
    assert "\n" not in str(e.value)


def test_a_prompt_in_its_style(tmp_path):
    byte_level(tmp_path)
    (tmp_path / "model_config.yaml").write_text("name: Qwen3-0.6B\n")
    codec = TextCodec.from_checkpoint(tmp_path)
    assert codec.decode(codec.encode_prompt("hi")) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert TextCodec.from_checkpoint(tmp_path, "none").encode_prompt("hi") == codec.encode("hi")
    assert TextCodec.from_checkpoint(tmp_path, config_name="nano").prompt_style is None
    (tmp_path / "model_config.yaml").write_text("name: [")
    with pytest.raises(CheckpointError) as e:
        TextCodec.from_checkpoint(tmp_path)
    assert "model_config.yaml" in str(e.value)


def test_a_chat_template_is_not_executed_by_this_process(tmp_path):
    byte_level(tmp_path, config={"chat_template": "{{ 1/0 }}"})
    codec = TextCodec.from_checkpoint(tmp_path)
    with pytest.raises(UsageError) as e:
        codec.encode_prompt("hi")
    codec.close()
    assert e.value.code == "template" and "--prompt-style none" in str(e.value)


def test_stop_tokens_that_the_tokenizer_lacks_are_left_out(tmp_path, caplog):
    byte_level(tmp_path / "json", special=("<|endoftext|>",))
    with caplog.at_level(logging.WARNING, "mdi.text.texts"):
        assert TextCodec.from_checkpoint(tmp_path / "json", "llama3").stop_sequences == []
    assert "Llama3" in caplog.text and "<|eot_id|>" in caplog.text
    spm(tmp_path / "spm")
    assert TextCodec.from_checkpoint(tmp_path / "spm", "llama3").stop_sequences == []


@pytest.mark.parametrize(("style", "word", "newline"), [("falcon", "User", 193), ("phi-1", "Answer", 198)])
def test_styles_that_name_their_stops_as_ids(tmp_path, style, word, newline):
    """A model of these seldom ends with its own token: it goes on with the next question."""
    byte_level(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_tokens([word])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    own, colon = map(tokenizer.token_to_id, (word, ":"))
    first, second = TextCodec.from_checkpoint(tmp_path, style).stop_sequences
    assert first == [own, colon] and second[:2] == [newline, own]


# ---- detokenizer


def streamed(codec, ids, cuts, continues=False):
    detokenizer = Detokenizer(codec, continues)
    edges = [0, *sorted(min(c, len(ids)) for c in cuts), len(ids)]
    pieces = [detokenizer.push(ids[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    return "".join(pieces) + detokenizer.flush()


many = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@many
@given(text=st.text(max_size=60), continues=st.booleans(), cuts=st.lists(st.integers(0, 80), max_size=6))
def test_streamed_text_is_the_decoded_text(codec, text, continues, cuts):
    ids = codec.encode(text)
    whole = codec.decode(ids, continues)
    assert streamed(codec, ids, range(len(ids)), continues) == whole
    assert streamed(codec, ids, cuts, continues) == whole


@functools.cache
def garbage(codec):
    """Lists of ids, among them some of bytes and of blanks."""
    blank = [i for i in range(codec.vocab_size) if not codec.decode([i]).strip()]
    some = st.sampled_from(sorted(codec.byte_ids) or [0]) | st.sampled_from(blank)
    return st.lists(st.integers(-1, codec.vocab_size + 3) | some, max_size=80)


@many
@given(data=st.data(), continues=st.booleans(), cuts=st.lists(st.integers(0, 80), max_size=6))
def test_streamed_garbage_is_decoded_garbage(codec, data, continues, cuts):
    """As an untrained model makes it: broken characters, special tokens, ids that do not exist."""
    ids = data.draw(garbage(codec))
    whole = codec.decode(ids, continues)
    assert streamed(codec, ids, range(len(ids)), continues) == whole
    assert streamed(codec, ids, cuts, continues) == whole


@many
@given(st.lists(st.sampled_from(["\u3042", "\u3044", "\u3046", "\u3048", "\U0001f642", "a", "\ufffd"]), max_size=60))
def test_tokens_that_begin_and_end_within_characters(codecs, characters):
    codec, text = codecs["byte_level"], "".join(characters)
    ids = codec.encode(text)
    detokenizer, shown = Detokenizer(codec), ""
    for n, i in enumerate(ids, start=1):
        shown += detokenizer.push([i])
        assert text.startswith(shown)
        # Never more than one character behind what is complete.
        assert len(shown) >= len(codec.decode(ids[:n]).rstrip("\ufffd")) - (text.count("\ufffd") > 0)
    assert shown + detokenizer.flush() == text


@pytest.mark.parametrize("case", ["text", "bytes", "blank", "special", "missing", "broken"])
def test_the_cost_of_a_token_does_not_grow(codec, case, monkeypatch):
    ids = {
        "text": codec.encode("the house of ghosts "),
        "bytes": sorted(codec.byte_ids) or codec.encode("\u3042\U0001f643"),
        "blank": [i for i in set(range(codec.vocab_size)) - codec.byte_ids if codec.decode([i], True) == " "][:1],
        "special": sorted(codec.eos_ids),
        "missing": [10**6],
        "broken": codec.encode("\ufffd")[-1:] or [3],
    }[case]
    stream = (ids * 2000)[:2000]
    n_decoded = 0
    original = codec.decode_visible

    def counting(ids, continues=False):
        nonlocal n_decoded
        n_decoded += len(ids)
        return original(ids, continues)

    monkeypatch.setattr(codec, "decode_visible", counting)
    detokenizer = Detokenizer(codec)
    text = "".join([detokenizer.push([i]) for i in stream]) + detokenizer.flush()
    assert n_decoded <= 40 * len(stream)
    monkeypatch.undo()
    assert text == codec.decode(stream)


def test_nothing_unfinished_is_shown(folders, codecs):
    codec = codecs["llama"]
    token_to_id = tokenizers.Tokenizer.from_file(str(folders["llama"] / "tokenizer.json")).token_to_id
    detokenizer = Detokenizer(codec)
    smile = "\U0001f643".encode()  # not in the vocabulary
    ids = [token_to_id(f"<0x{b:02X}>") for b in smile]
    assert [detokenizer.push([i]) for i in ids] == [""] * 4
    assert detokenizer.push([token_to_id("a")]) == "\U0001f643a"
    assert detokenizer.push(ids[:2]) == ""
    assert detokenizer.flush() == "\ufffd\ufffd"
    assert detokenizer.flush() == ""


# ---- stop strings


def stopped(stop, text, cuts=()):
    matcher = StopMatcher(stop)
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    shown, met = "", False
    for a, b in zip(edges, edges[1:], strict=False):
        safe, met_now = matcher.push(text[a:b])
        shown += safe
        assert not met or (met_now and not safe)
        met = met_now
    return shown + matcher.flush(), met


def test_stop_strings_cut_the_text():
    assert stopped(["\nQ:"], "one\ntwo\nQ: three") == ("one\ntwo", True)
    assert stopped(["x", "lo"], "hello x") == ("hel", True)
    assert stopped(["abcd", "bc"], "abcd") == ("a", True)
    assert stopped(["stop"], "no st") == ("no st", False)
    assert stopped([], "anything") == ("anything", False)
    assert stopped(["aab"], "aaab") == ("a", True)


def test_the_beginning_of_a_stop_string_is_held_back():
    matcher = StopMatcher(["</s>", "<end>"])
    assert matcher.push("a<") == ("a", False)
    assert matcher.push("e") == ("", False)
    assert matcher.push("<") == ("<e", False)
    assert matcher.push("/s") == ("", False)
    assert matcher.met == "" and matcher.push(">b") == ("", True) and matcher.met == "</s>"
    assert matcher.push("c") == ("", True)
    assert matcher.flush() == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(UsageError) as e:
        StopMatcher(["a", ""])
    assert "stop" in str(e.value)


@settings(max_examples=400, deadline=None)
@given(
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    text=st.text("abc", max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_stopping_does_not_depend_on_the_pieces(stop, text, cuts):
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(s) for s in stop)]
    expected = (text, False)
    if ends:
        longest = max(len(s) for s in stop if text[: ends[0]].endswith(s))
        expected = (text[: ends[0] - longest], True)
    assert stopped(stop, text) == expected
    assert stopped(stop, text, cuts) == expected
    assert stopped(stop, text, range(len(text))) == expected


# ---- prompts


def test_prompts_for_samples(caplog):
    assert read_prompts([]) == ["Who are you?"] * 3
    assert read_prompts(["a"]) == ["a"] * 3
    assert read_prompts(["a"], default=1) == ["a"]
    assert read_prompts(["a", "b"]) == ["a", "b"]
    assert read_prompts(["a", "b"], 5) == ["a", "b", "a", "b", "a"]
    assert read_prompts([" a\n"], 1) == [" a\n"]
    with caplog.at_level(logging.WARNING, "mdi.spec.prompts"):
        assert not caplog.records
        assert read_prompts(["a", "b", "c"], 2) == ["a", "b"]
    assert "1 of the 3 prompts are left out" in caplog.text


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_a_file_has_a_prompt_per_paragraph(tmp_path, newline):
    path = tmp_path / "prompts.txt"
    text = "\n\n  one\ntwo  \n\n \t\n\n\nth\u00e4t's three\n\nfour\n\n\n"
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", newline).encode())
    assert read_prompts([f"FILE:{path}"]) == ["one\ntwo", "th\u00e4t's three", "four"]
    assert read_prompts(["first", f"FILE:{path}"], 6) == [
        "first",
        "one\ntwo",
        "th\u00e4t's three",
        "four",
        "first",
        "one\ntwo",
    ]


@pytest.mark.parametrize(
    "value, code",
    [
        ("", "empty"),
        ("FILE:", "missing"),
        ("FILE:{tmp}", "missing"),
        ("FILE:{tmp}/a/b.txt", "missing"),
        ("FILE:{tmp}/empty.txt", "empty"),
        ("FILE:{tmp}/blank.txt", "empty"),
        ("FILE:{tmp}/latin.txt", "unreadable"),
        ("FILE:{tmp}/empty.txt/x", "unreadable"),
        ("FILE:a\0b", "unreadable"),
        ("a\udcffb", "unreadable"),
    ],
)
def test_prompts_that_cannot_be_used(tmp_path, value, code):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text(" \n\n\t\n")
    (tmp_path / "latin.txt").write_bytes(b"ab\xe9c")
    with pytest.raises(UsageError) as e:
        read_prompts(["good", value.replace("{tmp}", str(tmp_path))])
    assert e.value.code == code
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("n_samples", [0, -1])
def test_at_least_one_sample(n_samples):
    with pytest.raises(UsageError) as caught:
        read_prompts(["a"], n_samples)
    assert caught.value.code == "value"
