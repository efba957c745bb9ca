// Light or dark, set before the first paint; the choice of the person goes before that of the system.

(() => {
  const KEPT = "ericllm-theme";
  const root = document.documentElement;
  let chosen = null;
  try {
    chosen = localStorage.getItem(KEPT);
  } catch {
    // the browser keeps nothing
  }
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (chosen ? chosen === "dark" : system.matches);

  function apply() {
    root.dataset.theme = isDark() ? "dark" : "light";
    for (const button of document.querySelectorAll("[data-switches-theme]")) {
      button.setAttribute("aria-label", isDark() ? "Use light colours" : "Use dark colours");
      button.title = button.getAttribute("aria-label");
    }
  }

  function turn() {
    chosen = isDark() ? "light" : "dark";
    if ((chosen === "dark") === system.matches) chosen = null; // as the system has it: follow that again
    try {
      if (chosen) localStorage.setItem(KEPT, chosen);
      else localStorage.removeItem(KEPT);
    } catch {
      // it lasts as long as the page
    }
    apply();
  }

  apply();
  system.addEventListener("change", apply);
  document.addEventListener("DOMContentLoaded", () => {
    apply();
    for (const button of document.querySelectorAll("[data-switches-theme]")) button.addEventListener("click", turn);
  });
})();
