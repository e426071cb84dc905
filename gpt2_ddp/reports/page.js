
const { panels, runs, lines } = JSON.parse(document.getElementById("points").textContent)
const tip = document.getElementById("tip")
const cell = (row, text) => Object.assign(row.insertCell(), { textContent: text })
const figure = document.querySelector("figure")
const guide = document.createElementNS("http://www.w3.org/2000/svg", "path")
guide.setAttribute("style", "fill: none; stroke: currentColor; stroke-width: .8; pointer-events: none")
const leave = () => { tip.hidden = true; guide.remove() }
figure.addEventListener("pointerleave", leave)
figure.addEventListener("pointermove", event => {
  const svg = event.target.closest("svg")
  if (!svg) return leave()
  svg.append(guide)
  const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse())
  const panel = panels.findIndex(([l, t, r, b]) => l <= at.x && at.x <= r && t <= at.y && at.y <= b)
  const near = lines.flatMap(line => {
    const distance = i => Math.abs(line.x[i] - at.x), most = 8
    const i = line.x.reduce((best, _, i) => distance(i) < distance(best) ? i : best, 0)
    const past = line.x.at(-1) + most < at.x || at.x < line.x[0] - most
    return line.panel != panel || past ? [] : [{ ...line, i, x: line.x[i], y: line.y[i] }]
  }).sort((a, b) => a.y - b.y)
  if (!near.length) return leave()
  const [, top, , bottom] = panels[panel]
  const circles = near.map(point => `M${point.x - 3} ${point.y}a3 3 0 1 0 6 0a3 3 0 1 0-6 0`)
  guide.setAttribute("d", `M${at.x} ${top}V${bottom}${circles.join("")}`)
  tip.replaceChildren(document.createElement("table"))
  for (const point of near) {
    const row = tip.firstChild.insertRow()
    cell(row, "\u25cf").style.color = runs[point.run].color
    cell(row, runs[point.run].name)
    cell(row, point.label)
    cell(row, `step ${point.step[point.i].toLocaleString("en")}`)
    cell(row, point.value[point.i] ?? "not finite")
  }
  tip.hidden = false
  const right = event.clientX > innerWidth / 2
  tip.style.left = right ? "auto" : `${event.clientX + 16}px`
  tip.style.right = right ? `${document.documentElement.clientWidth - event.clientX + 16}px` : "auto"
  tip.style.top = `${Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8)}px`
})
