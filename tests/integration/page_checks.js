// What is wrong with how a page looks, by kind; each list is empty where nothing is.
() => {
  const texts = [...document.querySelectorAll('svg text')];
  const scaled = text => Math.hypot(text.getScreenCTM().a, text.getScreenCTM().b);
  const size = element => parseFloat(getComputedStyle(element).fontSize);

  const small = [
    ...texts.map(text => [text.textContent, scaled(text) * size(text)]),
    ...[...document.querySelectorAll('main :not(svg, svg *)')].map(other => [other.textContent.slice(0, 40), size(other)]),
  ].filter(([, pixels]) => pixels < 11);

  const touching = [...document.querySelectorAll('svg')].flatMap(svg => {
    const boxes = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
    return boxes.flatMap(([text, a], place) => boxes.slice(place + 1)
      .filter(([, b]) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2)
      .map(([other]) => `${text} / ${other}`));
  });

  const clipped = texts.filter(text => {
    const box = text.getBoundingClientRect(), frame = text.ownerSVGElement.getBoundingClientRect();
    return box.left < frame.left - 1 || box.right > frame.right + 1
      || box.top < frame.top - 1 || box.bottom > frame.bottom + 1;
  }).map(text => text.textContent);

  // Contrast ratio as WCAG 2.1 defines it; 4.5 is what its level AA asks of text.
  const luminance = colour => {
    const [r, g, b] = colour.match(/[0-9.]+/g).slice(0, 3).map(value => value / 255)
      .map(value => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const probe = document.body.appendChild(document.createElement('span'));
  const of = name => {
    probe.style.color = `var(--${name})`;
    return luminance(getComputedStyle(probe).color);
  };
  const pale = ['ink', 'muted', 'run', 'other', 'recovery'].flatMap(name => ['surface', 'card'].map(ground => {
    const [low, high] = [of(name), of(ground)].sort((a, b) => a - b);
    return [`${name} on ${ground}`, (high + 0.05) / (low + 0.05)];
  })).filter(([, ratio]) => ratio < 4.5);
  probe.remove();

  const flat = [...document.querySelectorAll('svg')].map(svg => svg.getBoundingClientRect().height).filter(h => h < 80);
  const wide = document.documentElement.scrollWidth > innerWidth ? [document.documentElement.scrollWidth] : [];
  return { small, touching, clipped, pale, flat, wide };
}
