"""Devices of a fleet that train together."""

import asyncio

from isthmus.wire import link_pb2

RAGGED = """
def local_data(self, participant):
    return rows(5 + 4 * int(participant.name[-1]), seed=sum(participant.name.encode()))
"""

POSITION = link_pb2.RoundPosition(start=1, steps=7, cohort=3)


async def updates(devices, opening, start, layout, round_=1, gradient=None, scale=0.0, **gathered):
    """Updates and replies of devices of a fleet, which train concurrently."""
    for device in devices:
        await device.work(link_pb2.Request(id="o", open=opening), None, None)
    sent = layout.gradient_and_update if scale else layout

    async def one(device):
        payload = layout.encode(start)
        if gradient is not None:
            payload += layout.encode(gradient)
        work = link_pb2.TrainLocal(run_id="run", round=round_, attempt=1, gradient_scale=scale)
        work.position.CopyFrom(POSITION)
        work.with_gradient = gradient is not None
        request = link_pb2.Request(id=device.participant.name, train_local=work)
        received = device.buffer(request, len(payload))
        received[:] = payload
        reply, back = await device.work(request, received, None)
        return sent.decode(back), reply.trained

    return await asyncio.gather(*(one(device) for device in devices), **gathered)
