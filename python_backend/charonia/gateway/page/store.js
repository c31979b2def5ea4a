// What the page remembers: settings for the next visit, the rest for this tab.
// Storage may be forbidden; then it is remembered until the page is left.

const memory = new Map();

class Store {
  constructor(area, prefix) {
    this.area = area;
    this.prefix = prefix;
  }

  get(name) {
    try {
      return globalThis[this.area].getItem(this.prefix + name);
    } catch {
      return memory.get(this.area + name) ?? null;
    }
  }

  set(name, value) {
    try {
      globalThis[this.area].setItem(this.prefix + name, value);
    } catch {
      memory.set(this.area + name, value);
    }
  }
}

/** For the next visit: never what the user writes to the model. */
export const settingsStore = new Store("localStorage", "charonia.");

/**
 * For this tab, also when the page is reloaded.
 *
 * Browsers copy it to a duplicate of the tab, and may keep it to open a closed tab again.
 */
export const tabStore = new Store("sessionStorage", "charonia.");
