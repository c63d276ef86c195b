// Fetches this page again every two seconds and replaces its content if that changed. GET only.
"use strict";
const live = document.getElementById("live");
let last = document.getElementById("main").innerHTML;

async function refresh() {
  if (document.hidden) return;
  try {
    const answer = await fetch(location.href, { cache: "no-store" });
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const main = page.getElementById("main");
    if (main.innerHTML !== last) {
      last = main.innerHTML;
      const open = [...document.querySelectorAll("details[open]")].map((d) => d.id);
      document.getElementById("main").replaceWith(document.adoptNode(main));
      for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    }
    live.textContent = page.getElementById("live").textContent;
    live.classList.remove("lost");
  } catch {
    live.classList.add("lost");
  }
}

setInterval(refresh, 2000);
