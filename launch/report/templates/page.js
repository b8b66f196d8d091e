// The values of a curve under the pointer: of each line those of the nearest point.
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
    tip.innerText = texts.join('\n');
    at.hidden = tip.hidden = false;
    at.style.left = `${100 * share}%`;
    const most = Math.max(0, width - tip.offsetWidth);
    tip.style.left = `${Math.min(share * width + 8, most)}px`;
  });
  plot.addEventListener('pointerleave', hide);
}
