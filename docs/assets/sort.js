// A click on a heading sorts the table by the numbers of that column ("96.0 ± 1.3" counts as 96.0), or by
// its words; a second click turns the order round.
document$.subscribe(() => {
  for (const table of document.querySelectorAll("article table:not([class])")) {
    for (const [column, head] of [...table.querySelectorAll("thead th")].entries()) {
      head.style.cursor = "pointer";
      head.title = "sort";
      head.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") !== "descending";
        for (const other of table.querySelectorAll("thead th")) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const text = (row) => row.cells[column].textContent.trim();
        const number = (row) => parseFloat(text(row).replace(/,/g, ""));
        const rows = [...table.tBodies[0].rows].sort((a, b) => {
          const x = number(a), y = number(b);
          if (isNaN(x) && isNaN(y)) return text(a).localeCompare(text(b)) * (down ? 1 : -1);
          if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y);  // "–" is last in both orders
          return down ? y - x : x - y;
        });
        table.tBodies[0].append(...rows);
      });
    }
  }
});
