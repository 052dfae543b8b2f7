// What is shown, in the address: capture, picked layer, step, stretch of time, searches. Back and forward go through it.

const address = {
  read: () => new URLSearchParams(location.hash.slice(1)),
  // `kept` for what the back button is to take back
  set(changes, kept = false) {
    const now = this.read();
    for (const [name, value] of Object.entries(changes)) if (value === null || value === "") now.delete(name); else now.set(name, value);
    const hash = `#${now}`;
    if (hash === (location.hash || "#")) return;
    history[kept ? "pushState" : "replaceState"](null, "", hash);
  },
};

// the last of many calls, when they have stopped for a moment
function settled(action, wait = 250) {
  let timer;
  return (...given) => { clearTimeout(timer); timer = setTimeout(() => action(...given), wait); };
}
