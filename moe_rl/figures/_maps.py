"""Matrices in colours: what the figures with maps of experts share."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.ticker import MaxNLocator

from moe_rl.figures._bars import Array


def draw_map(axes: Axes, grid: Array, top: float, first_row: int, ticks: int) -> QuadMesh:
    """A matrix in colours from 0 to top; nan stays without."""
    rows, columns = (np.arange(size + 1) - 0.5 for size in grid.shape)
    values = np.ma.masked_invalid(grid)
    mesh = axes.pcolormesh(columns, rows + first_row, values, cmap="viridis", vmin=0, vmax=top, rasterized=True)
    axes.grid(False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(ticks, integer=True, min_n_ticks=1))
    return mesh
