"""Tasks from what was written for another library, in one line each.

    from isthmus.integrations import lightning_task, trainer_task

    Digits = lightning_task(LitDigits, DigitsData)
    Reviews = trainer_task(model_init=build, args=arguments, train_dataset=rows)

What would train something else is refused in one sentence. Neither library is imported here.
"""

from isthmus.integrations.lightning_modules import LightningTask, lightning_task
from isthmus.integrations.trainers import TrainerTask, trainer_task

__all__ = ["LightningTask", "TrainerTask", "lightning_task", "trainer_task"]
