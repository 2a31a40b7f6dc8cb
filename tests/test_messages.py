"""Messages and their transcript: one form in bytes, nothing else let in, and each adversary sees what it could see."""

from __future__ import annotations

import hashlib
import json
import math
import random
import secrets
import struct
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tacit.errors import BadInput, Refused, TacitError
from tacit.federation.messages import KINDS, SERVER, TYPES, Inbox, Message
from tacit.federation.transcript import ROLES, Adversary, Record, Transcript, rounds
from tacit.graph import Graph

PARTIES = 4
BEGIN = len(b"tacit") + 1 + 4

# -- making messages ---------------------------------------------------------------------------------------------------


def ids(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


def table(*lines, type=torch.float32):
    return torch.tensor(lines, dtype=type).reshape(len(lines), -1)


def rows(sender=0, receiver=SERVER, *, round=3, phase=1, part="entity", **arrays):
    arrays = arrays or {"ids": ids(1, 4), "values": table([1, 2], [3, 4])}
    return Message("rows", round, phase, sender, receiver, {"part": part}, arrays)


def counts(*numbers, sender=0):
    return Message("counts", 0, 1, sender, SERVER, {"part": "entity"}, {"values": torch.tensor(numbers)})


def places(*numbers, total=6):
    return Message("places", 0, 1, SERVER, 1, {"part": "entity", "total": total}, {"ids": ids(*numbers)})


def names(*words, count=None, sender=0):
    says = {"part": "entity", "count": len(words) if count is None else count}
    return Message("names", 0, 0, sender, SERVER, says, {"text": torch.tensor(list("\n".join(words).encode())).byte()})


OF_EACH_KIND = [rows(), rows(values=table([1, 2]).half()), counts(1.0, 2.0), places(5, 0, 2), names("a", "b")]


def of_bytes(content, form, shape):
    return torch.from_numpy(np.ndarray(shape, np.dtype(form), bytearray(content)))


@st.composite
def messages(draw, kinds=tuple(KINDS), most_round=2**31, largest=4):
    """Any message that may be, by what `KINDS` says; arrays of any bits."""
    name = draw(st.sampled_from(kinds))
    kind = KINDS[name]
    arrays = {}
    for array, wanted in kind.arrays.items():
        if wanted.optional and draw(st.booleans()):
            continue
        form = draw(st.sampled_from(wanted.types))
        shape = tuple(draw(st.integers(0, largest)) for _ in range(wanted.dimensions))
        size = math.prod(shape) * np.dtype(form).itemsize
        arrays[array] = of_bytes(draw(st.binary(min_size=size, max_size=size)), form, shape)
    says = {word: draw(st.sampled_from(allowed)) for word, allowed in kind.words.items()}
    says |= {number: draw(st.integers(0, most)) for number, most in kind.numbers.items()}
    ends = st.integers(-1, PARTIES - 1)
    sender, receiver = draw(st.tuples(ends, ends).filter(lambda both: both[0] != both[1]))
    return Message(name, draw(st.integers(0, most_round)), draw(st.integers(0, 255)), sender, receiver, says, arrays)


def raw(tensor):
    return bytes(tensor.flatten().view(torch.uint8).tolist()) if tensor.numel() else b""


def same(message, other):
    plain = ("kind", "round", "phase", "sender", "receiver", "says")
    return (
        all(getattr(message, name) == getattr(other, name) for name in plain)
        and message.arrays.keys() == other.arrays.keys()
        and all(
            (a := message.arrays[name]).dtype == (b := other.arrays[name]).dtype
            and a.shape == b.shape
            and raw(a) == raw(b)
            for name in message.arrays
        )
    )


def slow_bytes(message):
    """The bytes as the module's first words describe them, put together by hand."""
    types = {torch.uint8: "u1", torch.uint32: "u4", torch.int64: "i8", torch.float64: "f8", torch.float32: "f4",
             torch.float16: "f2"}  # fmt: skip
    described = ",".join(
        f'["{name}","{types[t.dtype]}",[{",".join(map(str, t.shape))}]]' for name, t in sorted(message.arrays.items())
    )
    says = ",".join(
        f'"{name}":"{value}"' if isinstance(value, str) else f'"{name}":{value}'
        for name, value in sorted(message.says.items())
    )
    header = (
        f'{{"arrays":[{described}],"kind":"{message.kind}","phase":{message.phase},"receiver":{message.receiver},'
        f'"round":{message.round},"says":{{{says}}},"sender":{message.sender}}}'
    ).encode()
    body = b"".join(raw(tensor) for _, tensor in sorted(message.arrays.items()))
    return b"tacit" + bytes([1]) + len(header).to_bytes(4, "little") + header + body


# -- there and back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_a_message_comes_back_from_its_bytes(kind, data):
    message = data.draw(messages((kind,)))
    encoded = message.encode()
    assert len(encoded) == message.size
    decoded = Message.decode(encoded)
    assert same(decoded, message)
    assert decoded.size == message.size
    assert decoded.encode() == encoded


@given(messages())
def test_the_bytes_are_the_documented_ones(message):
    assert message.encode() == slow_bytes(message)


@given(messages())
def test_equal_messages_have_equal_bytes(message):
    backwards = {name: tensor.clone() for name, tensor in reversed(message.arrays.items())}
    other = replace(message, says=dict(reversed(message.says.items())), arrays=backwards)
    assert other.encode() == message.encode()


@given(messages(), messages())
def test_messages_that_differ_have_different_bytes(message, other):
    assert (message.encode() == other.encode()) == same(message, other)


@pytest.mark.parametrize(
    "look",
    [lambda t: t.T, lambda t: t[::2], lambda t: t[:, 1:], lambda t: t[:1].expand(3, -1), lambda t: t.requires_grad_()],
    ids=["turned", "every other", "without a column", "repeated", "with gradient"],
)
def test_looks_at_other_tensors_are_sent_as_what_they_show(look):
    shown = look(torch.arange(12.0).reshape(4, 3))
    message = rows(values=shown)
    decoded = Message.decode(message.encode())
    assert message.size == len(message.encode())
    assert decoded.arrays["values"].tolist() == shown.tolist()


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (0, 1 << 36), (1 << 36, 0)])
def test_empty_arrays_keep_their_shape(shape):
    decoded = Message.decode(rows(values=torch.zeros(shape)).encode())
    assert tuple(decoded.arrays["values"].shape) == shape


def test_a_decoded_message_does_not_look_at_the_bytes_it_came_from():
    source = bytearray(rows().encode())
    decoded = Message.decode(source)
    source[:] = bytes(len(source))
    assert same(decoded, rows())
    decoded.arrays["values"].zero_()


# -- what cannot be a message ------------------------------------------------------------------------------------------

GOOD = {"round": 3, "phase": 1, "sender": 0, "receiver": SERVER}


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        *[(name, value, name) for name in GOOD for value in (1.0, True, "1", None, 1 << 40, [1], math.nan, -2)],
        ("sender", -1.0, "sender"),
        ("receiver", -1.0, "receiver"),
        ("receiver", 0, "oneself"),
        ("phase", 256, "phase"),
        ("phase", -1, "phase"),
        ("round", -1, "round"),
        ("kind", "row", "no kind"),
        ("kind", "", "no kind"),
        ("says", {}, "says part"),
        ("says", {"part": "entity", "more": 1}, "says part"),
        ("says", {"part": "entities"}, "part is one of"),
        ("says", {"part": None}, "part is one of"),
        ("says", {"part": ["entity"]}, "part is one of"),
        ("arrays", {}, "has the arrays"),
        ("arrays", {"ids": ids(1)}, "has the arrays"),
        ("arrays", {"values": table([1.0]), "more": ids(1)}, "has the arrays"),
        ("arrays", {"values": table([1.0]).double()}, "type f4 or f2"),
        ("arrays", {"values": table([1.0]).bfloat16()}, "type f4 or f2"),
        ("arrays", {"values": table([1.0]).long()}, "type f4 or f2"),
        ("arrays", {"values": table([1.0]), "ids": ids(1).int()}, "type i8"),
        ("arrays", {"values": torch.ones(3)}, "2 dimensions"),
        ("arrays", {"values": torch.ones(1, 1, 1)}, "2 dimensions"),
        ("arrays", {"values": torch.tensor(1.0)}, "2 dimensions"),
        ("arrays", {"values": table([1.0]), "ids": ids(1)[None]}, "1 dimensions"),
    ],
)
def test_what_cannot_be_said_cannot_be_made(field, value, reason):
    with pytest.raises(Refused, match=reason):
        replace(rows(), **{field: value})


@pytest.mark.parametrize("value", [-1, 1 << 41, 2.0, True, "2", None])
@pytest.mark.parametrize("message", [names("a"), places(0)], ids=["count", "total"])
def test_numbers_of_a_kind_have_a_range(message, value):
    name = next(iter(KINDS[message.kind].numbers))
    with pytest.raises(Refused, match=f"{name} is a whole number"):
        replace(message, says=message.says | {name: value})


# -- bytes that are no message -----------------------------------------------------------------------------------------


def header_of(data):
    return json.loads(data[BEGIN : BEGIN + int.from_bytes(data[6:10], "little")])


def body_of(data):
    return data[BEGIN + int.from_bytes(data[6:10], "little") :]


def canonical(content):
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def packed(header, body=b"", length=None):
    return b"tacit" + struct.pack("<BI", 1, len(header) if length is None else length) + header + body


@pytest.mark.parametrize("message", OF_EACH_KIND, ids=lambda message: message.kind)
def test_bytes_cut_off_anywhere_are_refused(message):
    data = message.encode()
    for end in range(len(data)):
        reason = "not a message" if end < BEGIN else "cut off"
        with pytest.raises(Refused, match=reason):
            Message.decode(data[:end])


@pytest.mark.parametrize("message", OF_EACH_KIND, ids=lambda message: message.kind)
@pytest.mark.parametrize("more", [b"\0", b" ", b"\n", bytes(1000)])
def test_bytes_after_a_message_are_refused(message, more):
    with pytest.raises(Refused, match=f"{len(more):,} bytes after"):
        Message.decode(message.encode() + more)
    with pytest.raises(Refused):
        Message.decode(more + message.encode())


def test_two_messages_are_not_one():
    with pytest.raises(Refused, match="after the last array"):
        Message.decode(rows().encode() * 2)


@pytest.mark.parametrize("magic", [b"TACIT", b"tacis", b"\0acit", b"PK\3\4\0"])
def test_other_magic_is_refused(magic):
    with pytest.raises(Refused, match="not a message of tacit"):
        Message.decode(magic + rows().encode()[5:])


@pytest.mark.parametrize("version", [0, 2, 255])
def test_other_versions_are_refused_and_named(version):
    data = bytearray(rows().encode())
    data[5] = version
    with pytest.raises(Refused, match=f"version {version}; .* version 1"):
        Message.decode(bytes(data))


@pytest.mark.parametrize("message", OF_EACH_KIND, ids=lambda message: message.kind)
@pytest.mark.parametrize("lie", [-1, 1, -10, 3, 1 << 16, (1 << 32) - 1000, None])
def test_a_header_is_as_long_as_it_says(message, lie):
    data = message.encode()
    header = canonical(header_of(data))
    length = 0 if lie is None else len(header) + lie
    with pytest.raises(Refused, match=r"not JSON|longer than it may be|nothing else"):
        Message.decode(packed(header, body_of(data), length))


def test_a_header_of_the_right_content_that_is_too_long_is_refused():
    data = rows().encode()
    header = canonical(header_of(data))
    with pytest.raises(Refused, match="longer than it may be"):
        Message.decode(packed(header + b" " * (1 << 16), body_of(data)))


def test_a_message_has_at_most_the_bytes_that_are_asked_for():
    data = rows().encode()
    assert same(Message.decode(data, largest=len(data)), rows())
    with pytest.raises(Refused, match=f"{len(data)} bytes, and no message has more than {len(data) - 1}"):
        Message.decode(data, largest=len(data) - 1)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b'"phase":1,"receiver":-1', b'"receiver":-1,"phase":1', "canonical"),
        (b'"phase":1', b'"phase": 1', "canonical"),
        (b'"phase":1', b' "phase":1', "canonical"),
        (b'"phase":1', b'"phase":1,"phase":1', "canonical"),
        (b'"phase":1', b'"phase":9,"phase":1', "canonical"),
        (b'"phase":1', b'"ph\\u0061se":1', "canonical"),
        (b'"kind":"rows"', b'"kind":"r\\u006fws"', "canonical"),
        (b'"ids"', b'"\\u0069ds"', "canonical"),
        (b'"phase":1', b'"phase":-0', "canonical"),
        (b'"part":"entity"', b'"part":"relation","part":"entity"', "canonical"),
        (b'"phase":1', b'"phase":01', "not JSON"),
        (b'"phase":1', b'"phase":1,', "not JSON"),
        (b'"phase":1', b'"phase":+1', "not JSON"),
        (b'"phase":1', b"'phase':1", "not JSON"),
        (b'"phase":1', b'"phase":' + b"1" * 5000, "not JSON"),
        (b'"phase":1', b'"phase":' + b"1" * 4000, "phase is a whole number"),
        (b'"phase":1', b'"phase":1.0', "phase is a whole number"),
        (b'"phase":1', b'"phase":1e0', "phase is a whole number"),
        (b'"phase":1', b'"phase":true', "phase is a whole number"),
        (b'"phase":1', b'"phase":NaN', "phase is a whole number"),
        (b'"phase":1', b'"phase":Infinity', "phase is a whole number"),
        (b'"phase":1', b'"phase":1e999', "phase is a whole number"),
        (b'"phase":1', b'"phase":"1"', "phase is a whole number"),
        (b'"phase":1', b'"phase":null', "phase is a whole number"),
        (b'"receiver":-1', b'"receiver":-1.0', "receiver is a whole number"),
        (b'"receiver":-1', b'"receiver":-1e0', r"receiver|canonical"),
        (b'"sender":0', b'"sender":-0.0', "sender is a whole number"),
        (b'"sender":0', b'"sender":-1', "oneself"),
        (b'"kind":"rows"', b'"kind":"\\ud800"', "no kind"),
        (b'"kind":"rows"', b'"kind":"r\xffws"', "not JSON"),
        (b'"kind":"rows"', b'"kind":["rows"]', "kind is a word"),
        (b"[2]", b"[2.0]", "size of an array"),
        (b"[2]", b"[true]", "size of an array"),
        (b"[2]", b"[-2]", "size of an array"),
        (b"[2,2]", b"[-2,-2]", "size of an array"),
        (b"[2,2]", b"[2,-1]", "size of an array"),
        (b"[2,2]", b"[2,1e3]", "size of an array"),
        (b"[2,2]", b"[2,1000000000000000000000000000000]", "size of an array"),
        (b"[2,2]", b"[68719476736,68719476736]", "larger than a message"),
        (b"[2,2]", b"[68719476736,1]", "cut off"),
        (b"[2]", b"[34359738368]", "cut off"),
        (b"[2,2]", b"[2,1]", "bytes after"),
        (b"[2,2]", b"[4]", "2 dimensions"),
        (b"[2]", b"[1,2]", "1 dimensions"),
        (b"[2,2]", b"[2,2,1]", "one dimension or two"),
        (b"[2,2]", b"4", "one dimension or two"),
        (b'["ids","i8",[2]]', b'["ids","f4",[4]]', "ids is of type i8"),
        (b'["ids","i8",[2]]', b'["ids","u1",[16]]', "ids is of type i8"),
        (b'["ids","i8",[2]]', b'["ids","c8",[2]]', "type of an array is one of"),
        (b'["ids","i8",[2]]', b'["ids","<i8",[2]]', "type of an array is one of"),
        (b'["ids","i8",[2]]', b'["ids","O",[2]]', "type of an array is one of"),
        (b'["ids","i8",[2]]', b'["ids",["i8"],[2]]', "type of an array is one of"),
        (b'["ids","i8",[2]]', b'[1,"i8",[2]]', "type of an array is one of"),
        (b'["ids","i8",[2]]', b'["ids","i8"]', "name, type and shape"),
        (b'["ids","i8",[2]]', b'["ids","i8",[2],0]', "name, type and shape"),
        (b'["ids","i8",[2]]', b'{"ids":["i8",[2]]}', "name, type and shape"),
        (b'["ids","i8",[2]]', b'["ids","i8",[1]],["ids","i8",[1]]', "name of its own"),
        (b'["ids","i8",[2]]', b'["idz","i8",[2]]', "has the arrays"),
        (b'["ids","i8",[2]]', b",".join([b'["ids","i8",[2]]'] * 17), "a few at most"),
        (b'["values","f4",[2,2]]', b'["values","f4",[2,2]],["z","u1",[0]]', "has the arrays"),
        (b'"arrays":[["ids","i8",[2]],["values","f4",[2,2]]]', b'"arrays":{}', "lists its arrays"),
        (b'"arrays":[["ids","i8",[2]],["values","f4",[2,2]]]', b'"arrays":[["values","f4",[4,2]]]', None),
        (b'"round":3', b'"round":3,"sand":1', "nothing else"),
        (b'"round":3,', b"", "nothing else"),
        (b'"round":3', b'"Round":3', "nothing else"),
        (b'"says":{"part":"entity"}', b'"says":{}', "says part"),
        (b'"says":{"part":"entity"}', b'"says":{"part":"entity","total":1}', "says part"),
        (b'"says":{"part":"entity"}', b'"says":["part"]', "by name"),
        (b'"says":{"part":"entity"}', b'"says":{"part":' + b"[" * 900 + b"]" * 900 + b"}", "part is one of"),
        (b'"says":{"part":"entity"}', b'"says":{"part":' + b"[" * 30000 + b"]" * 30000 + b"}", "not JSON"),
    ],
)
def test_a_header_in_any_other_form_is_refused(old, new, reason):
    data = rows().encode()
    header = canonical(header_of(data))
    assert header.count(old) == 1
    changed = packed(header.replace(old, new), body_of(data))
    if reason is None:  # the same bytes can be another message; then they are that one
        assert Message.decode(changed).arrays.keys() == {"values"}
        assert Message.decode(changed).encode() == changed
    else:
        with pytest.raises(Refused, match=reason):
            Message.decode(changed)


@pytest.mark.parametrize(
    "header", [b"", b"{}", b"[]", b"7", b"null", b'"rows"', b"[" * 60000, b"\xef\xbb\xbf{}", b"\0"]
)
def test_what_is_no_header_is_refused(header):
    with pytest.raises(Refused, match=r"not JSON|nothing else"):
        Message.decode(packed(header))


def test_arrays_come_in_the_order_of_their_names():
    content = header_of(rows().encode())
    content["arrays"].reverse()
    turned = raw(rows().arrays["values"]) + raw(rows().arrays["ids"])
    with pytest.raises(Refused, match="canonical"):
        Message.decode(packed(canonical(content), turned))


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_refused_or_a_message(data, with_magic):
    data = packed(data) if with_magic else data
    with pytest.raises(Refused):
        Message.decode(data)


# -- a million broken messages -----------------------------------------------------------------------------------------

PIECES = [0, 1, 2, 3, 4, -1, -2, 255, 256, 2**31, 2**31 + 1, 2**36, 2**63, 2**64, 10**40, -1.0, 0.0, 1.0, 3.0, 1e308]
PIECES += [
    math.nan,
    math.inf,
    True,
    False,
    None,
    "",
    "a",
    *KINDS,
    *TYPES,
    "entity",
    "relation",
    "ids",
    "values",
    "text",
]
PIECES += [[], {}, [0], [1], [2], [2, 2], [3, 2], [0, 2], [2, 2, 2], {"part": "entity"}, {"part": "relation"}, "\ud800"]
ODD_BITS = [struct.pack("<f", x) for x in (math.nan, math.inf, -math.inf, -1.0, -0.0, 2.0, 1e-45)]
ODD_BITS += [struct.pack("<q", x) for x in (-1, 0, 1, 2, 3, 4, 5, 6, 7, 2**62, -(2**63))]
ODD_BITS += [struct.pack("<e", math.inf), b"\n", b"\xff"]

EXPECTED = [
    {"kind": "names", "round": 0, "phase": 0, "receiver": SERVER, "rows": {0: 2, 1: 3, 2: 1}},
    {"kind": "places", "round": 0, "phase": 1, "receiver": 1, "rows": {SERVER: 3}},
    {"kind": "counts", "round": 0, "phase": 1, "receiver": SERVER, "rows": {0: 2, 1: 3, 2: 1}},
    {"kind": "rows", "round": 3, "phase": 1, "receiver": SERVER, "rows": {0: 2, 1: 3, 2: 1}, "width": 2, "total": 6},
    {"kind": "rows", "round": 3, "phase": 1, "receiver": 1, "rows": {SERVER: 3}, "width": 2},
]
VALID = [
    [names("a", "b").encode(), names("a", "b", "c", sender=1).encode(), names("x", sender=2).encode()],
    [places(0, 5, 2).encode(), places(2, 1, 0, total=3).encode(), places(5, 4, 3, total=7).encode()],
    [counts(1.0, 2.0).encode(), counts(1.0, 0.0, 3.0, sender=1).encode(), counts(7.0, sender=2).encode()],
    [
        rows().encode(),
        rows(values=table([1, 2], [3, 4])).encode(),
        rows(1, ids=ids(0, 2, 5), values=table([1, 2], [3, 4], [5, 6])).encode(),
        rows(1, values=table([1, 2], [3, 4], [5, 6]).half()).encode(),
        rows(2, ids=ids(3), values=table([1, 2], type=torch.float16)).encode(),
        rows(2, ids=ids(), values=torch.zeros(0, 2)).encode(),
    ],
    [rows(SERVER, 1, values=table([1, 2], [3, 4], [5, 6], type=form)).encode() for form in (torch.half, torch.float)],
]


def with_other_header(rng, data):
    """The header changed in one or two places, and put into canonical form again."""
    content, body = header_of(data), body_of(data)
    for _ in range(rng.randint(1, 2)):
        holder, key = content, rng.choice(list(content))
        while isinstance(holder[key], list | dict) and holder[key] and rng.random() < 0.8:
            holder = holder[key]
            key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
        act = rng.random()
        if act < 0.06:
            del holder[key]
        elif act < 0.12 and isinstance(holder, dict):
            holder[rng.choice(["part", "total", "count", "more", "kind"])] = holder.pop(key)
        elif act < 0.16 and isinstance(holder, list):
            holder.append(deepcopy(holder[key]))
        elif act < 0.5 and type(holder[key]) is int:
            holder[key] += rng.choice([-1, 1])
        elif act < 0.6:
            holder[key] = rng.choice([rng.randint(-3, 8), rng.getrandbits(40), rng.random(), rng.gauss(0, 1e9)])
        else:
            holder[key] = deepcopy(rng.choice(PIECES))
        if not content:
            break
    if rng.random() < 0.3:
        body = (body + bytes(16))[: rng.randrange(len(body) + 17)]
    return packed(canonical(content), body)


def mutated(rng, data, other):
    """Valid bytes, broken in one of many ways; some of them stay whole."""
    way, at = rng.random(), rng.randrange(len(data))
    if way < 0.15:
        return data
    if way < 0.45:
        return with_other_header(rng, data)
    if way < 0.65 and len(body_of(data)):
        bits = rng.choice(ODD_BITS)
        start = len(data) - len(body_of(data))
        start += rng.randrange(len(data) - start) // len(bits) * len(bits)
        return (data[:start] + bits + data[start + len(bits) :])[: len(data)]
    if way < 0.75:
        return data[:at] + other[rng.randrange(len(other)) :]
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(len(changed))
        if way < 0.85:
            changed[at] ^= 1 << rng.randrange(8)
        elif way < 0.9:
            changed[at:at] = rng.randbytes(rng.randint(1, 4))
        elif way < 0.95:
            del changed[at : at + rng.randint(1, 4)]
            changed = changed or bytearray(1)
        else:
            to = rng.randrange(len(changed))
            changed[at], changed[to] = changed[to], changed[at]
    return bytes(changed)


def broken_promises(expected, earlier, message):
    """What is wrong with letting this message in, said with plain numbers; nothing, if all is well."""
    listed = {name: tensor.tolist() for name, tensor in message.arrays.items()}
    ids, values = listed.get("ids"), listed.get("values")
    most = expected["rows"].get(message.sender)
    if most is None:
        yield "sender"
        return
    if message.sender in earlier:
        yield "twice"
    if message.says["part"] != "entity":
        yield "part"
    for name in ("kind", "round", "phase", "receiver"):
        if getattr(message, name) != expected[name]:
            yield name
    if ids is not None:
        limit = message.says["total"] if message.kind == "places" else expected.get("total")
        if limit is None or any(not 0 <= one < limit for one in ids):
            yield "ids out of range"
        if message.kind == "places" and (len(ids) != most or len(set(ids)) != most):
            yield "places"
        if message.kind == "rows" and (ids != sorted(set(ids)) or len(ids) > most):
            yield "ids"
    if values is not None:
        if len(values) != (most if ids is None else len(ids)):
            yield "number of rows"
        if message.kind == "rows" and message.arrays["values"].shape[1] != 2:
            yield "width"
        numbers = values if message.kind == "counts" else [x for row in values for x in row]
        if not all(math.isfinite(x) for x in numbers):
            yield "finite"
        if message.kind == "counts" and any(x < 0 for x in numbers):
            yield "negative counts"


def fuzz(count):
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    everything = [data for valid in VALID for data in valid]
    read = taken = 0
    inbox = None
    for number in range(count):
        if inbox is None or rng.random() < 0.2 or not inbox.missing:
            case = rng.randrange(len(EXPECTED))
            expected, earlier = EXPECTED[case], {}
            inbox = Inbox(part="entity", **expected)
        data = mutated(rng, rng.choice(VALID[case]), rng.choice(everything))
        place = f"seed {seed}, message {number}: {data!r}"
        try:
            message = Message.decode(data)
        except Refused:
            with pytest.raises(Refused):
                inbox.take(data)
            continue
        read += 1
        assert message.encode() == data, place
        plain = (message.round, message.phase, message.sender, message.receiver)
        assert all(type(field) is int for field in plain), place
        try:
            got = inbox.take(data if rng.random() < 0.5 else message)
        except Refused:
            assert inbox.taken.keys() == earlier.keys(), place
            continue
        taken += 1
        wrong = list(broken_promises(expected, earlier, got))
        assert not wrong, f"{wrong}; {place}"
        earlier[got.sender] = got
        assert inbox.taken == earlier, place
    assert count / 10 < read < count * 0.8, f"seed {seed}: {read} of {count} could be read"
    assert count / 30 < taken < read * 0.8, f"seed {seed}: {taken} of {read} were taken"


def test_ten_thousand_broken_messages_are_refused_or_right():
    fuzz(10_000)


@pytest.mark.full
def test_a_million_broken_messages_are_refused_or_right():
    fuzz(1_000_000)


# -- what an inbox lets in ---------------------------------------------------------------------------------------------


def an_inbox(number=3, **changes):
    return Inbox(**{"part": "entity", **EXPECTED[number], **changes})


@pytest.mark.parametrize("number", range(len(EXPECTED)))
def test_what_is_expected_is_taken_once_from_each(number):
    for data in VALID[number]:
        inbox = an_inbox(number)
        message = inbox.take(data)
        assert message.encode() == data
        assert inbox.messages() == [message]
        assert inbox.missing == EXPECTED[number]["rows"].keys() - {message.sender}
        for again in VALID[number]:
            if Message.decode(again).sender == message.sender:
                with pytest.raises(Refused, match="sent this already"):
                    inbox.take(again)
        assert inbox.messages() == [message]


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview, Message.decode])
def test_an_inbox_takes_bytes_of_any_sort_and_messages(form):
    inbox = an_inbox()
    assert same(inbox.take(form(rows().encode())), rows())
    assert inbox.missing == {1, 2}


def test_an_inbox_refuses_bytes_that_are_no_message():
    inbox = an_inbox()
    with pytest.raises(Refused, match="not a message"):
        inbox.take(b"hello")
    assert inbox.missing == {0, 1, 2}


NOT_TAKEN = [
    (3, rows(receiver=2), "someone else"),
    (3, rows(SERVER, 0), "someone else"),
    (3, counts(1.0, 2.0), "of kind counts"),
    (3, rows(round=2), "of round 2; this is round 3"),
    (3, rows(round=4), "of round 4; this is round 3"),
    (3, rows(phase=0), "of phase 0; this is phase 1"),
    (3, rows(phase=2), "of phase 2; this is phase 1"),
    (3, rows(3), "from 3, of whom nothing is expected"),
    (3, rows(part="relation"), "about relation rows"),
    (3, rows(values=table([1, 2, 3], [4, 5, 6])), "shape"),
    (3, rows(values=table([1], [2])), "shape"),
    (3, rows(values=table([1, 2])), "shape"),
    (3, rows(values=table([1, 2], [3, 4], [5, 6])), "shape"),
    (3, rows(values=torch.zeros(0, 2)), "shape"),
    (3, rows(ids=ids(1), values=table([1, 2], [3, 4])), "shape"),
    (3, rows(ids=ids(1, 2), values=table([1, 2])), "shape"),
    (3, rows(ids=ids(), values=table([1, 2])), "shape"),
    (3, rows(ids=ids(1, 2), values=table([1, 2, 3], [4, 5, 6])), "shape"),
    (3, rows(ids=ids(1, 2, 3), values=table([1, 2], [3, 4], [5, 6])), "3 ids, where there are 2 rows"),
    (3, rows(ids=ids(4, 1), values=table([1, 2], [3, 4])), "not in order"),
    (3, rows(ids=ids(4, 4), values=table([1, 2], [3, 4])), "named twice"),
    (3, rows(1, ids=ids(1, 4, 3), values=table([1, 2], [3, 4], [5, 6])), "not in order"),
    (3, rows(ids=ids(1, 6), values=table([1, 2], [3, 4])), "beyond"),
    (3, rows(ids=ids(-1, 1), values=table([1, 2], [3, 4])), "beyond"),
    (3, rows(ids=ids(2**62), values=table([1, 2])), "beyond"),
    (3, rows(ids=ids(-(2**63), 2**63 - 1), values=table([1, 2], [3, 4])), "beyond"),
    *[
        (3, rows(values=table([1, 2], [3, odd], type=form)), "not finite")
        for odd in (math.nan, math.inf, -math.inf)
        for form in (torch.float32, torch.float16)
    ],
    (4, rows(SERVER, 1, ids=ids(0, 1, 2), values=table([1, 2], [3, 4], [5, 6])), "none are expected"),
    (2, counts(1.0), "shape"),
    (2, counts(1.0, 2.0, 3.0), "shape"),
    (2, counts(1.0, -1.0), "counts that are not"),
    (2, counts(1.0, math.nan), "not finite"),
    (2, counts(1.0, math.inf), "not finite"),
    (1, places(0, 1), "2 ids, where there are 3"),
    (1, places(0, 1, 2, 3), "4 ids, where there are 3"),
    (1, places(0, 1, 6), "beyond"),
    (1, places(0, 1, -1), "beyond"),
    (1, places(1, 5, 1), "one place"),
]


@pytest.mark.parametrize(("number", "message", "reason"), NOT_TAKEN)
def test_what_is_not_expected_is_refused_and_leaves_no_trace(number, message, reason):
    inbox = an_inbox(number)
    for form in (message, message.encode()):
        with pytest.raises(Refused, match=reason):
            inbox.take(form)
    assert not inbox.messages()
    assert inbox.missing == set(EXPECTED[number]["rows"])
    for data in VALID[number][:1]:
        inbox.take(data)


def test_half_floats_are_taken_as_they_are():
    message = an_inbox().take(rows(values=table([1, 2], [3, 65504], type=torch.float16)).encode())
    assert message.arrays["values"].dtype == torch.float16
    assert message.arrays["values"].tolist() == [[1, 2], [3, 65504]]


def test_places_are_among_the_shared_rows_that_the_inbox_knows_of():
    assert an_inbox(1, total=6).take(places(0, 5, 2, total=6))
    with pytest.raises(Refused):
        an_inbox(1, total=6).take(places(0, 1000, 2, total=1001))


def test_no_more_names_are_taken_than_the_sender_has_rows():
    with pytest.raises(Refused):
        an_inbox(0).take(names("a", "b", "c"))


@given(st.permutations(range(6)), st.sets(st.integers(0, 5)))
def test_messages_are_in_the_order_of_senders_whoever_comes_first(order, absent):
    inbox = an_inbox(rows=dict.fromkeys(order, 1))
    for sender in order:
        if sender not in absent:
            inbox.take(rows(sender, values=table([sender, 0])))
    assert [message.sender for message in inbox.messages()] == sorted(set(order) - absent)
    assert [int(message.arrays["values"][0, 0]) for message in inbox.messages()] == sorted(set(order) - absent)
    assert inbox.missing == absent


# -- the transcript ----------------------------------------------------------------------------------------------------

sent = st.lists(messages(most_round=3), max_size=12)
FIELDS = ("round", "phase", "kind", "part", "sender", "receiver")


def noted(messages, **options):
    transcript = Transcript(**options)
    for message in messages:
        transcript.record(message)
    return transcript


def keep_all(record):
    return True


@given(sent)
def test_every_message_is_recorded_in_its_order_with_its_size(messages):
    transcript = Transcript()
    returned = [transcript.record(message) for message in messages]
    assert transcript.records == returned
    assert [record.number for record in returned] == list(range(len(messages)))
    for record, message in zip(returned, messages, strict=True):
        assert record.size == len(message.encode())
        assert record.part == message.says.get("part")
        for name in ("kind", "round", "phase", "sender", "receiver"):
            assert getattr(record, name) == getattr(message, name)
        assert record.sha256 is None
    assert not transcript.payloads
    assert transcript.kept == transcript.dropped == 0


@given(sent, st.lists(st.sampled_from(FIELDS), unique=True, max_size=3))
def test_bytes_are_counted_by_any_fields(messages, fields):
    expected = {}
    for message in messages:
        key = tuple(message.says.get("part") if name == "part" else getattr(message, name) for name in fields)
        expected.setdefault(key, []).append(message.encode())
    assert noted(messages).bytes_by(*fields) == {key: len(b"".join(found)) for key, found in expected.items()}


@given(sent)
def test_traffic_is_what_a_party_sent_and_received(messages):
    transcript = noted(messages)
    for party in range(-1, PARTIES + 1):
        traffic = {"sent": 0, "received": 0}
        for message in messages:
            traffic["sent"] += len(message.encode()) * (message.sender == party)
            traffic["received"] += len(message.encode()) * (message.receiver == party)
        assert transcript.traffic(party) == traffic


@given(sent, st.integers(0, PARTIES - 1), st.integers(0, 1500))
def test_what_is_kept_is_what_the_filter_asks_for_up_to_the_cap(messages, party, cap):
    transcript = noted(messages, keep=lambda record: record.sender == party, cap=cap)
    room, dropped, kept = cap, 0, {}
    for number, message in enumerate(messages):
        if message.sender == party and message.size > room:
            dropped += 1
        elif message.sender == party:
            room -= message.size
            kept[number] = message
    assert transcript.payloads.keys() == kept.keys()
    assert all(same(transcript.payloads[number], message) for number, message in kept.items())
    assert (transcript.dropped, transcript.kept) == (dropped, cap - room)
    for record, message in zip(transcript.records, messages, strict=True):
        expected = hashlib.sha256(slow_bytes(message)).hexdigest() if record.number in kept else None
        assert record.sha256 == expected


@pytest.mark.parametrize("room", [-1, 0])
def test_the_cap_is_the_last_byte_that_is_kept(room):
    transcript = noted([rows(), rows()], keep=keep_all, cap=2 * rows().size + room)
    assert (len(transcript.payloads), transcript.dropped) == ((2, 0) if room == 0 else (1, 1))
    assert len(transcript.records) == 2


@given(st.integers(1, 4), st.none() | st.sets(st.integers(-1, PARTIES - 1)), sent)
def test_rounds_keeps_every_so_many_rounds_of_some_parties(every, parties, messages):
    transcript = noted(messages, keep=rounds(every, parties))
    assert transcript.payloads.keys() == {
        number
        for number, message in enumerate(messages)
        if (
            message.round in range(0, 4, every)
            or (message.round > 1 and (message.round - 1) % every == 0 and (message.kind, message.phase) == ("rows", 0))
        )
        and (parties is None or message.sender in parties or message.receiver in parties)
    }


def test_kept_content_does_not_move_with_the_rows_it_was_taken_from():
    own = torch.arange(8.0).reshape(4, 2)
    message = rows(ids=ids(1, 4), values=own[1:3])
    transcript = noted([message], keep=keep_all)
    before = message.encode()
    own.zero_()
    message.arrays["ids"].zero_()
    assert message.encode() != before
    assert transcript.payloads[0].encode() == before
    assert transcript.records[0].sha256 == hashlib.sha256(before).hexdigest()


def test_kept_content_does_not_change_with_what_the_message_said():
    message = rows()
    transcript = noted([message], keep=keep_all)
    before = message.encode()
    message.says["part"] = "relation"
    assert transcript.payloads[0].encode() == before


# -- on disk -----------------------------------------------------------------------------------------------------------


def written(transcript, folder):
    (folder / "payloads").mkdir(exist_ok=True)
    (folder / "lines").write_text("".join(line + "\n" for line in transcript.lines()))
    for number, message in transcript.payloads.items():
        (folder / "payloads" / f"{number:08d}").write_bytes(message.encode())
    return folder / "lines", folder / "payloads"


def loaded(lines, payloads):
    transcript = Transcript()
    transcript.load(lines, payloads)
    return transcript


@given(sent, st.integers(0, 3))
def test_a_transcript_comes_back_from_disk(tmp_path_factory, messages, sender):
    transcript = noted(messages, keep=lambda record: record.sender != sender)
    again = loaded(*written(transcript, tmp_path_factory.mktemp("transcript")))
    assert again.records == transcript.records
    assert again.kept == transcript.kept
    assert again.payloads.keys() == transcript.payloads.keys()
    assert all(same(again.payloads[number], message) for number, message in transcript.payloads.items())
    assert list(again.lines()) == list(transcript.lines())


def test_lines_begin_where_they_are_asked_to():
    transcript = noted([rows(sender) for sender in range(4)])
    assert [json.loads(line)["number"] for line in transcript.lines(2)] == [2, 3]
    assert [json.loads(line)["number"] for line in transcript.lines()] == [0, 1, 2, 3]
    assert all("\n" not in line for line in transcript.lines())


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"\0", lambda data: b"x" + data[1:]])
def test_a_changed_payload_is_refused(tmp_path, change):
    lines, payloads = written(noted([rows(), rows(1)], keep=keep_all), tmp_path)
    file = payloads / "00000001"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(BadInput, match="00000001: was changed"):
        loaded(lines, payloads)


def test_payloads_that_changed_places_are_refused(tmp_path):
    lines, payloads = written(noted([rows(), rows(1)], keep=keep_all), tmp_path)
    (payloads / "00000000").write_bytes(rows(1).encode())
    with pytest.raises(BadInput, match="00000000: was changed"):
        loaded(lines, payloads)


def test_a_missing_payload_is_refused(tmp_path):
    lines, payloads = written(noted([rows(), rows(1)], keep=keep_all), tmp_path)
    (payloads / "00000001").unlink()
    with pytest.raises(TacitError, match="00000001"):
        loaded(lines, payloads)


GOOD_LINE = json.loads(next(iter(noted([rows(), rows(1)]).lines(1))))


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "{}",
        "[]",
        "7",
        "null",
        '"x"',
        "\ufeff{}",
        "[" * 100_000,
        json.dumps(GOOD_LINE)[:-1],
        json.dumps(GOOD_LINE | {"more": 1}),
        json.dumps({name: value for name, value in GOOD_LINE.items() if name != "size"}),
        *[json.dumps(GOOD_LINE | {"number": number}) for number in (0, 2, -1, "1", None)],
        *[json.dumps(GOOD_LINE | {"size": size}) for size in ("12", -1)],
        *[json.dumps(GOOD_LINE | {"sender": sender}) for sender in ("0", None)],
    ],
    ids=lambda line: line[-30:],
)
def test_a_broken_line_is_refused_with_its_number(tmp_path, line):
    lines, payloads = written(noted([rows(), rows(1), rows(2)]), tmp_path)
    whole = lines.read_text().splitlines()
    lines.write_text("\n".join([whole[0], line, whole[2]]) + "\n")
    with pytest.raises(BadInput, match="lines:2: found"):
        loaded(lines, payloads)


@pytest.mark.parametrize("change", [{"sender": 2}, {"size": 1}, {"round": 9}, {"part": "relation"}, {"kind": "names"}])
def test_a_record_that_is_not_its_payloads_is_refused(tmp_path, change):
    lines, payloads = written(noted([rows()], keep=keep_all), tmp_path)
    lines.write_text(json.dumps(json.loads(lines.read_text()) | change) + "\n")
    with pytest.raises(BadInput):
        loaded(lines, payloads)


# -- what an adversary sees --------------------------------------------------------------------------------------------

GRAPHS = [Graph.from_triples([(f"a{party}", "r", "b")]) for party in range(PARTIES)]
ADVERSARIES = [
    *[Adversary(role) for role in ("server", "ledger-reader", "outsider")],
    *[Adversary(role, party) for role in ("party", "server+party", "peer") for party in range(PARTIES)],
]


def saw(adversary, record):
    at_the_server = record.sender == SERVER or record.receiver == SERVER
    at_the_party = record.sender == adversary.party or record.receiver == adversary.party
    return {
        "server": at_the_server,
        "party": at_the_party,
        "server+party": at_the_server or at_the_party,
        "peer": at_the_party,
        "ledger-reader": record.kind == "record",
        "outsider": False,
    }[adversary.role]


def test_there_is_an_adversary_of_every_role():
    assert {adversary.role for adversary in ADVERSARIES} == ROLES.keys()


@pytest.mark.parametrize("adversary", ADVERSARIES, ids=str)
@given(messages=sent, sender=st.integers(0, PARTIES - 1))
def test_an_adversary_sees_what_passed_before_its_eyes_and_no_more(adversary, messages, sender):
    transcript = noted(messages, keep=lambda record: record.sender != sender)
    transcript.records.append(Record(len(messages), 1, 0, "record", None, sender, SERVER, 10))
    transcript.records.append(Record(len(messages) + 1, 1, 0, "record", None, sender, (sender + 1) % PARTIES, 10))
    view = transcript.view(adversary, graphs=GRAPHS)
    assert list(view.records) == [record for record in transcript.records if saw(adversary, record)]
    kept = [r for r in transcript.records if saw(adversary, r) and r.sender != sender]
    assert view.payloads.keys() == {record.number for record in kept}
    assert [record for record, _ in view.messages()] == kept
    assert all(same(message, messages[record.number]) for record, message in view.messages())
    for wanted in range(-1, PARTIES):
        assert [r for r, _ in view.messages(sender=wanted, part="entity")] == [
            r for r in kept if r.sender == wanted and r.part == "entity"
        ]


@pytest.mark.parametrize("adversary", ADVERSARIES, ids=str)
def test_an_adversary_has_its_own_graph_and_no_one_elses(adversary):
    view = noted([rows()], keep=keep_all).view(adversary, graphs=GRAPHS)
    graphs = [value for value in vars(view).values() if isinstance(value, Graph)]
    if adversary.party is None:
        assert view.graph is None
        assert not graphs
    else:
        assert view.graph is GRAPHS[adversary.party]
        assert [id(graph) for graph in graphs] == [id(GRAPHS[adversary.party])]
    assert noted([]).view(adversary).graph is None


@pytest.mark.parametrize("adversary", ADVERSARIES, ids=str)
def test_leaks_and_published_rows_are_there_only_as_declared(adversary):
    transcript = noted([rows()], keep=keep_all)
    view = transcript.view(adversary, graphs=GRAPHS)
    assert view.leaks == {}
    assert view.published is None
    declared, published = {"degrees": [1, 2]}, {"entity": torch.ones(2)}
    view = transcript.view(adversary, published=published, leaks=declared)
    assert view.leaks == {"degrees": [1, 2]}
    assert view.published is published
    declared["more"] = 1
    assert view.leaks == {"degrees": [1, 2]}
    assert transcript.view(adversary).leaks == {}


def test_what_is_sent_after_a_view_is_not_in_it():
    transcript = noted([rows()], keep=keep_all)
    view = transcript.view(Adversary("server"))
    transcript.record(rows(1))
    assert len(view.records) == len(view.payloads) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("nobody",),
        ("",),
        ("serv",),
        ("Server",),
        (None,),
        ("server", 0),
        ("ledger-reader", 0),
        ("outsider", 1),
        ("party",),
        ("peer",),
        ("server+party",),
        ("nobody", 1),
        *[(role, party) for role in ("party", "peer", "server+party") for party in (SERVER, -2)],
    ],
    ids=str,
)
def test_an_adversary_that_cannot_be_is_refused(arguments):
    with pytest.raises(TacitError, match="the adversary"):
        Adversary(*arguments)


def test_a_party_that_is_not_there_cannot_be_the_adversary():
    with pytest.raises(TacitError):
        noted([rows()]).view(Adversary("party", PARTIES), graphs=GRAPHS)
