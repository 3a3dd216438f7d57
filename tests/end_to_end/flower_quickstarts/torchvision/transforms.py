import torch


class Compose:
    def __init__(self, steps):
        self.steps = steps

    def __call__(self, image):
        for step in self.steps:
            image = step(image)
        return image


class ToTensor:
    def __call__(self, image):
        return torch.from_numpy(image).permute(2, 0, 1).float() / 255


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = (torch.tensor(each).view(-1, 1, 1) for each in (mean, std))

    def __call__(self, image):
        return (image - self.mean) / self.std
