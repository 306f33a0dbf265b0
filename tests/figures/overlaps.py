"""Whether the texts of a figure can be read: none covers another, none leaves the figure."""

from __future__ import annotations

from typing import Any


def overlaps(figure: Any) -> list[str]:
    """Pairs of texts that cover each other by more than a pixel, and texts that leave the figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    unseen = unseen_tick_labels(figure)
    # Slanted labels are boxed by upright rectangles, which may cross where the letters do not.
    texts = [
        text
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and text.get_rotation() != 40 and text not in unseen
    ]
    drawn = [(text.get_text(), text.get_window_extent(renderer).padded(-1)) for text in texts]
    found = [
        f"{name} | {other}"
        for place, (name, box) in enumerate(drawn)
        for other, other_box in drawn[place + 1 :]
        if box.overlaps(other_box)
    ]
    whole = figure.bbox
    found += [
        f"{name} leaves the figure"
        for name, box in drawn
        if box.x0 < whole.x0 or box.x1 > whole.x1 or box.y0 < whole.y0 or box.y1 > whole.y1
    ]
    return found


def unseen_tick_labels(figure: Any) -> list[Any]:
    """Labels of ticks outside the axis, which matplotlib keeps and does not draw."""
    unseen = []
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if not low <= tick.get_loc() <= high:
                    unseen += [tick.label1, tick.label2]
    return unseen
