"use strict";
(function () {
  var data = JSON.parse(document.getElementById("data").textContent);

  // Diverging, told apart by colour-blind readers, too. Source: ColorBrewer PuOr, 9 classes.
  var COLORS = ["#542788", "#8073ac", "#b2abd2", "#d8daeb", "#f7f7f7", "#fee0b6", "#fdb863", "#e08214", "#b35806"];
  var EDGES = [1 / 30, 1 / 6, 1 / 2, 1];
  var VIEWS = {
    ratio: { label: "student \u2212 teacher of the token's unit", unit: "nats", low: "the teacher likes it more", high: "the student likes it more", sign: 1 },
    weight: { label: "OPD weight", unit: "nats", low: "pushed up", high: "pushed down", sign: 1 },
    advantage: { label: "advantage, all terms", unit: "", low: "pushed up", high: "pushed down", sign: -1 }
  };

  function element(tag, name, text) {
    var made = document.createElement(tag);
    if (name) { made.className = name; }
    if (text !== undefined) { made.textContent = text; }
    return made;
  }

  function full(view) {
    if (view !== "advantage") { return data.limit; }
    var largest = 0;
    data.strips.forEach(function (strip) {
      strip.advantage.forEach(function (value) { largest = Math.max(largest, Math.abs(value || 0)); });
    });
    return largest || 1;
  }

  function bin(value, limit) {
    var size = Math.abs(value) / limit, step = 0;
    while (step < EDGES.length && size >= EDGES[step]) { step += 1; }
    return value < 0 ? 4 - step : 4 + step;
  }

  function inkOn(place) { return place === 0 || place === 8 ? "#fff" : "#000"; }

  function valueOf(strip, index, view) {
    if (view !== "ratio") { return strip[view][index]; }
    return strip.unit[index] === null ? null : strip.ratio[strip.unit[index]];
  }

  function paint(box, view) {
    var limit = full(view);
    box.querySelectorAll(".token").forEach(function (token) {
      var value = valueOf(data.strips[token.dataset.strip], token.dataset.index, view);
      var place = value === null ? null : bin(VIEWS[view].sign * value, limit);
      token.style.background = place === null ? "" : COLORS[place];
      token.style.color = inkOn(place);
    });
    var legend = box.querySelector(".legend .key");
    legend.replaceChildren(element("span", "", VIEWS[view].low + " "), scale(limit, view), element("span", "", " " + VIEWS[view].high));
  }

  function scale(limit, view) {
    var box = element("span", "scale"), shown = VIEWS[view].sign > 0;
    COLORS.forEach(function (color, place) {
      var step = Math.abs(place - 4);
      var edge = step ? (limit * EDGES[step - 1]).toPrecision(2).replace(/\.?0+$/, "") : "0";
      var sign = step === 0 ? "" : (place > 4) === shown ? "> " : "< \u2212";
      var cell = element("span", "", sign + edge);
      cell.style.background = color;
      cell.style.color = inkOn(place);
      box.append(cell);
    });
    return box;
  }

  function number(value) { return value === null ? "none" : String(value); }

  function describe(strip, index) {
    var unit = strip.unit[index], rows = [
      ["token", JSON.stringify(strip.text[index])],
      ["span", strip.kind[index]],
      ["log-probability when sampled", number(strip.logprob[index]) + " nats"]
    ];
    if (unit === null) {
      rows.push(["unit", "none: the teacher has no say here"]);
    } else {
      var size = strip.unit.filter(function (other) { return other === unit; }).length;
      rows.push(["unit", "number " + strip.units[unit] + ", " + size + (size === 1 ? " token" : " tokens")]);
      rows.push(["student \u2212 teacher of the unit", number(strip.ratio[unit]) + " nats"]);
      rows.push(["teacher's log-probability of it", number(strip.teacher[unit]) + " nats"]);
    }
    rows.push(["OPD weight", number(strip.weight[index])]);
    rows.push(["advantage", number(strip.advantage[index])]);
    if (strip.stopped[index]) { rows.push(["stopped", "behind a unit that the teacher rejects: weight 0"]); }
    return rows;
  }

  var tip = document.getElementById("tip");
  function showTip(token) {
    var table = element("table");
    describe(data.strips[token.dataset.strip], Number(token.dataset.index)).forEach(function (row) {
      var line = element("tr");
      line.append(element("td", "", row[0]), element("td", "", row[1]));
      table.append(line);
    });
    tip.replaceChildren(table);
    tip.hidden = false;
    var at = token.getBoundingClientRect(), size = tip.getBoundingClientRect();
    var below = at.bottom + 8 + size.height < window.innerHeight;
    tip.style.left = Math.max(4, Math.min(at.left, window.innerWidth - size.width - 8)) + "px";
    tip.style.top = (below ? at.bottom + 8 : Math.max(4, at.top - size.height - 8)) + "px";
  }
  document.addEventListener("mouseover", function (event) {
    var token = event.target.closest && event.target.closest(".token");
    if (token) { showTip(token); } else { tip.hidden = true; }
  });
  document.addEventListener("click", function (event) {
    var token = event.target.closest && event.target.closest(".token");
    if (token) { showTip(token); }
  });
  document.addEventListener("scroll", function () { tip.hidden = true; }, { passive: true });

  function tokenElement(strip, stripIndex, index) {
    var token = element("span", "token" + (strip.stopped[index] ? " stopped" : ""));
    token.dataset.strip = stripIndex;
    token.dataset.index = index;
    strip.text[index].split("\n").forEach(function (part, line) {
      if (line) { token.append(element("span", "break", "\u21b5"), "\n"); }
      token.append(part);
    });
    return token;
  }

  function fillStrip(place) {
    var stripIndex = Number(place.dataset.strip), strip = data.strips[stripIndex];
    var box = element("div", "tokens"), group = null, last;
    strip.text.forEach(function (_, index) {
      var unit = strip.unit[index];
      if (group === null || unit === null || unit !== last) {
        group = element("span", unit === null ? "unit none" : "unit");
        box.append(group);
      }
      last = unit;
      group.append(tokenElement(strip, stripIndex, index));
    });
    place.replaceChildren(box);
  }

  function fillEpisode(details) {
    if (details.dataset.filled || !details.querySelector("[data-strip]")) { return; }
    details.dataset.filled = "yes";
    details.querySelectorAll(".strip[data-strip]").forEach(fillStrip);
    var choice = details.querySelector("select");
    choice.addEventListener("change", function () { paint(details, choice.value); });
    paint(details, choice.value);
  }

  var episodes = Array.from(document.querySelectorAll("details.episode"));
  episodes.forEach(function (details) {
    details.addEventListener("toggle", function () { if (details.open) { fillEpisode(details); } });
  });
  function openNamed() {
    var named = document.getElementById(location.hash.slice(1));
    if (named && named.matches("details.episode")) { named.open = true; fillEpisode(named); named.scrollIntoView(); }
  }
  window.addEventListener("hashchange", openNamed);

  // One chart after the other, so that the page can be read and scrolled meanwhile.
  function draw(index) {
    if (index === data.figures.length) {
      document.body.dataset.readyMs = Math.round(performance.now());
      openNamed();
      return;
    }
    var figure = data.figures[index];
    Plotly.newPlot("chart-" + index, figure.data, figure.layout, { responsive: true, displaylogo: false, displayModeBar: false }).then(function () {
      setTimeout(function () { draw(index + 1); }, 0);
    });
  }
  draw(0);
})();
