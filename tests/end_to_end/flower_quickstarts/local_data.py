"""scikit-learn's digits and irises as rows of the data sets that Flower's quickstarts download."""

import numpy as np
from sklearn.datasets import load_digits, load_iris

HELD_OUT = 300


def images(split):
    """Digits as 32 x 32 pixels in three channels, in the columns of `uoft-cs/cifar10`."""
    pixels, labels = load_digits(return_X_y=True)
    part = slice(HELD_OUT) if split == "test" else slice(HELD_OUT, None)
    large = np.kron(pixels[part].reshape(-1, 8, 8) * 15, np.ones((4, 4))).astype(np.uint8)
    return {"img": list(np.repeat(large[..., None], 3, axis=3)), "label": list(labels[part])}


def irises(names, target):
    """Irises in the order of a fixed draw; `names` of sepal length and width, petal likewise."""
    features, species = load_iris(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(species))
    columns = {name: features[order, place] for place, name in enumerate(names)}
    return {**columns, target: species[order]}


def load(name, split):
    if name == "uoft-cs/cifar10":
        return images(split)
    if name == "hitorilabs/iris":
        return irises(["sepal_length", "sepal_width", "petal_length", "petal_width"], "species")
    if name == "scikit-learn/iris":
        names = ["SepalLengthCm", "SepalWidthCm", "PetalLengthCm", "PetalWidthCm"]
        return irises(names, "Species")
    raise ValueError(f"there is no local data set {name!r}")
