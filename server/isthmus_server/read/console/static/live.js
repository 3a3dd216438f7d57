// Follows the version of what a page shows. A page of another version than the console's is loaded
// again, and only the parts that differ are replaced: focus, scroll positions and choices stay.

const chip = document.getElementById("live");
const words = { on: "live", waiting: "reconnecting", off: "not live" };

function show(state) {
  chip.dataset.state = state;
  if (chip.textContent !== words[state]) chip.textContent = words[state];
}

function replace(part, fresh) {
  if (part.innerHTML === fresh.innerHTML) return;
  const focused = part.contains(document.activeElement) ? document.activeElement : null;
  const place = focused && [...part.querySelectorAll("a, button, select, summary, [tabindex]")].indexOf(focused);
  const open = [...part.querySelectorAll("details")].map((each) => each.open);
  const scrolled = [...part.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
  part.replaceChildren(...fresh.childNodes);
  part.querySelectorAll("details").forEach((each, number) => (each.open = open[number] ?? each.open));
  part.querySelectorAll(".scroll").forEach((each, number) => (each.scrollLeft = scrolled[number] ?? 0));
  if (focused) {
    const same = focused.getAttribute("href") ?? "";
    const all = [...part.querySelectorAll("a, button, select, summary, [tabindex]")];
    (all.find((each) => same && each.getAttribute("href") === same) ?? all[place])?.focus({ preventScroll: true });
  }
}

async function update(redraw) {
  const answer = await fetch(location.href, { headers: { accept: "text/html" } });
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const before = new Set([...document.querySelectorAll("main > section")].map((each) => each.id));
  if ([...page.querySelectorAll("main > section")].some((each) => !before.has(each.id))) {
    location.reload(); // a part that the page did not have, such as the first datacenter's figures
    return;
  }
  for (const part of document.querySelectorAll("[data-live]")) {
    const fresh = page.getElementById(part.id);
    if (fresh) replace(part, fresh);
  }
  document.body.dataset.version = page.body.dataset.version;
  await redraw();
}

export function follow(redraw) {
  if (!document.body.dataset.version) return;
  let busy = false;
  let again = false;
  let wanted = document.body.dataset.version;

  async function catchUp() {
    if (busy) {
      again = true;
      return;
    }
    busy = true;
    try {
      do {
        again = false;
        if (document.body.dataset.version !== wanted) await update(redraw);
      } while (again);
    } catch {
      setTimeout(catchUp, 2000);
    } finally {
      busy = false;
    }
  }

  function listen() {
    const source = new EventSource(`/events?run=${encodeURIComponent(document.body.dataset.run)}`);
    source.addEventListener("open", () => show("on"));
    source.addEventListener("version", (event) => {
      wanted = event.data;
      catchUp();
    });
    source.addEventListener("error", () => {
      show("waiting");
      if (source.readyState === EventSource.CLOSED) setTimeout(listen, 2000);
    });
    addEventListener("pagehide", () => source.close(), { once: true });
  }
  listen();
}
