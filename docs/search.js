// A flag is searched for by its name: to the search, a word that begins with a hyphen is one that pages must not have.
for (const kind of ["input", "keyup"])
  document.addEventListener(kind, ({ target }) => {
    if (target.matches?.(".md-search__input") && /(^|\s)-+\w/.test(target.value))
      target.value = target.value.replace(/(^|\s)-+(?=\w)/g, "$1");
  }, true);
