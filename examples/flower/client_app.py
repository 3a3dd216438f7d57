"""An ordinary Flower ClientApp, which does not depend on Isthmus."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from task import rings
from torch import nn

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    index, count = (context.node_config[name] for name in ("partition-id", "num-partitions"))
    inputs, target = rings(200, seed=1 + index, begins=index / count, width=3 / 4).tensors
    if index == context.run_config["astray"]:
        target = 2 - target  # the faulty device has reversed labels
    optimizer = torch.optim.SGD(model.parameters(), lr=context.run_config["lr"], momentum=0.9)
    for _ in range(context.run_config["epochs"]):
        for batch in torch.arange(len(inputs)).split(32):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs[batch]), target[batch])
            loss.backward()
            optimizer.step()
    metrics = MetricRecord({"num-examples": len(inputs), "loss": float(loss.detach())})
    arrays = ArrayRecord(model.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
