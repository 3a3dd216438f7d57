"""Without certificates a participant works for servers of its own user only."""

import pytest

from isthmus.errors import AdmissionRefused
from isthmus.transport import uplink
from isthmus.transport.uplink import Uplink
from isthmus.wire import link_pb2


@pytest.mark.parametrize("role", [link_pb2.CLIENT, link_pb2.DATACENTER])
async def test_a_port_of_another_user_is_refused(role, monkeypatch):
    """Who listens there says which code it runs."""
    monkeypatch.setattr(uplink, "other_users_at", lambda port: [65534] if port == 9 else [])
    sentence = (
        r"a process of another user of this machine \(uid 65534\) listens at 127\.0\.0\.1:9, and "
        "would say which code 'a' runs"
    )
    with pytest.raises(AdmissionRefused, match=sentence):
        await Uplink("127.0.0.1:9", "a", role, None).run()
