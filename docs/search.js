// Searches for a flag by its name: the search reads a leading hyphen as "pages without this word".
for (const kind of ["input", "keyup"])
  document.addEventListener(kind, ({ target }) => {
    if (target.matches?.(".md-search__input") && /(^|\s)-+\w/.test(target.value))
      target.value = target.value.replace(/(^|\s)-+(?=\w)/g, "$1");
  }, true);
