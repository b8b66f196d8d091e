"""Frame, style and script of the pages of this package."""

from __future__ import annotations

import html as markup

from launch.base.text import shown

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;
  color:#1b2733;background:#fff;overflow-wrap:anywhere}
h1{font-size:1.5rem;margin:0 0 .25rem}h2{font-size:1.1rem;margin:2rem 0 .5rem}
p{margin:.3rem 0}.note{font-size:.9rem;color:#52606d}
table{border-collapse:collapse;width:100%}
td,th{padding:.3rem .6rem;border-bottom:1px solid #e3e8ee;text-align:left;vertical-align:top}
th{white-space:nowrap}
td.n{text-align:right;font-variant-numeric:tabular-nums;overflow-wrap:normal}th.n{text-align:right}
pre{background:#f5f7fa;padding:1rem;white-space:pre-wrap;font-size:.85rem;line-height:1.4;
  border-radius:.4rem;margin:.5rem 0}
svg{width:100%;height:auto}.wide{overflow-x:auto}.wide svg{min-width:44rem}
figure{margin:0 0 1.5rem}figcaption{font-size:.9rem;color:#52606d}
summary{cursor:pointer;font-size:1.1rem;font-weight:bold;margin:2rem 0 .5rem}
.curve figcaption{display:flex;flex-wrap:wrap;gap:.1rem .9rem;margin-bottom:.4rem}
.curve label{margin-left:auto}
.key i{display:inline-block;width:.8rem;height:.25rem;margin-right:.3rem;vertical-align:middle}
.plot{position:relative;margin-left:4rem;height:12rem}.plot>.log{display:none}
.curve:has(input:checked) .log{display:block}.curve:has(input:checked) .linear{display:none}
.plot svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible}
.ys span{position:absolute;right:100%;margin-right:.4rem;transform:translateY(-50%);
  font-size:.75rem;color:#52606d;white-space:nowrap}
.xs{display:flex;justify-content:space-between;margin:.3rem 0 0 4rem;font-size:.75rem;
  color:#52606d}
.at{position:absolute;top:0;bottom:0;width:1px;background:#9aa5b1;pointer-events:none}
.tip{position:absolute;top:0;background:#fff;border:1px solid #c9d1d9;border-radius:.3rem;
  padding:.1rem .5rem;font-size:.8rem;pointer-events:none;white-space:nowrap}
@media(max-width:32rem){body{margin:1rem auto;padding:0 .8rem}table{font-size:.85rem}
  td,th{padding:.3rem}.plot,.xs{margin-left:3.2rem}}
"""
# The values of a curve under the pointer: of each line those of the nearest point.
SCRIPT = """
for (const figure of document.querySelectorAll('.curve')) {
  const {unit, lines} = JSON.parse(figure.dataset.values);
  const plot = figure.querySelector('.plot');
  const [at, tip] = [plot.querySelector('.at'), plot.querySelector('.tip')];
  const all = lines.flatMap(([, xs]) => [xs[0], xs.at(-1)]);
  const low = Math.min(...all), span = Math.max(...all) - low || 1;
  const nearest = (xs, x) => {
    let [a, b] = [0, xs.length - 1];
    while (b - a > 1) { const m = (a + b) >> 1; if (xs[m] < x) a = m; else b = m; }
    return x - xs[a] < xs[b] - x ? a : b;
  };
  const hide = () => { at.hidden = tip.hidden = true; };
  plot.addEventListener('pointermove', event => {
    const {left, width} = plot.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - left) / width));
    const x = low + share * span;
    const texts = lines.map(([name, xs, ys]) => {
      const i = nearest(xs, x);
      return `${unit} ${xs[i].toLocaleString('en')}: ${name} ${ys[i]}`;
    });
    tip.innerText = texts.join('\\n');
    at.hidden = tip.hidden = false;
    at.style.left = `${100 * share}%`;
    const most = Math.max(0, width - tip.offsetWidth);
    tip.style.left = `${Math.min(share * width + 8, most)}px`;
  });
  plot.addEventListener('pointerleave', hide);
}
"""


def page(title: str, body: str, style: str = "") -> str:
    """A self-contained page: it loads nothing."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escaped(title)}</title><meta'
        f' name="viewport" content="width=device-width"><style>{STYLE}{style}</style>{body}'
        f"<script>{SCRIPT}</script></html>\n"
    )


def escaped(text: str) -> str:
    return markup.escape(shown(text))
