"""Data with declared, public preprocessing: the packaged Adult table, tables and image sets from files.

N, bounds, categories, classes and scaling constants are taken as public; nothing is learned from rows.
"""

from diskdp.datasets.images import SCALINGS, Scaling, load_images
from diskdp.datasets.packaged import adult
from diskdp.datasets.schema import Categorical, Ignored, Label, Numeric, Schema, Unit
from diskdp.datasets.split import DataInfo, Split
from diskdp.datasets.tables import load_table

__all__ = [
    "SCALINGS",
    "Categorical",
    "DataInfo",
    "Ignored",
    "Label",
    "Numeric",
    "Scaling",
    "Schema",
    "Split",
    "Unit",
    "adult",
    "load_images",
    "load_table",
]
