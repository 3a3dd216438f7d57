"""What the server and the process of a ServerApp send each other.

A message of `isthmus.system.channel`, and the encoded records of which it says the sizes::

    message     {"op": "exchange", ..., "sizes": [1024, 88]}
    records     as `isthmus_flower.records.encode` writes them, one after another

Both ends run with the rights of the server, so that the sizes of records are not limited.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.system.channel import framed
from isthmus_flower.messages import Error, Message, RecordDict, message
from isthmus_flower.records import decode, encode

Fields = Mapping[str, Any]


def packed(fields: Fields, blobs: Sequence[bytes] = ()) -> bytes:
    """A message with these fields, and encoded records."""
    header = json.dumps({**fields, "sizes": [len(blob) for blob in blobs]}).encode()
    return b"".join((framed(header), *blobs))


def describe_messages(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Fields of messages, and their records; those that several messages share are encoded once."""
    places: dict[int, int] = {}
    blobs: list[bytes] = []
    fields = []
    for each in messages:
        place = None
        if each.has_content():
            place = places.setdefault(id(each.content), len(blobs))
            if place == len(blobs):
                blobs.append(encode(each.content))
        metadata = each.metadata
        fields.append(
            {
                "id": metadata.message_id,
                "kind": metadata.message_type,
                "source": metadata.src_node_id,
                "to": metadata.dst_node_id,
                "answers": metadata.reply_to_message_id,
                "group": metadata.group_id,
                "error": [each.error.code, each.error.reason] if each.has_error() else None,
                "records": place,
            }
        )
    return fields, blobs


def read_messages(fields: Sequence[Fields], blobs: Sequence[bytes]) -> list[Message]:
    """The messages that `describe_messages` described; shared records are one object again."""
    records: list[RecordDict] = [decode(blob) for blob in blobs]
    return [
        message(
            None if each["records"] is None else records[each["records"]],
            kind=each["kind"],
            source=each["source"],
            to=each["to"],
            id_=each["id"],
            answers=each["answers"],
            group=each["group"],
            error=None if each["error"] is None else Error(*each["error"]),
        )
        for each in fields
    ]
