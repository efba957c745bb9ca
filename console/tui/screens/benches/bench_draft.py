"""Values typed into the form of a bench, kept while other benches, sizes and places are shown. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from console.link.benches import BenchField, BenchForm, BenchOrder, BenchServer

TRACE = "trace"
"""The setting that others follow."""


@dataclass(slots=True)
class BenchDraft:
    """quick: values that were not typed are those of a quick run.  server: its url is "" for the engine."""

    quick: bool = True
    server: BenchServer = BenchServer(url="")  # noqa: RUF009 - frozen
    _typed: dict[tuple[str, str], str] = field(default_factory=dict)

    def offered(self, form: BenchForm, setting: BenchField) -> str:
        """Return the default of a setting."""
        if setting.traced and self._typed.get((form.bench, TRACE)):
            return setting.traced
        return setting.quick if self.quick else setting.full

    def value(self, form: BenchForm, setting: BenchField) -> str:
        """Return the value of a setting."""
        return self._typed.get((form.bench, setting.name), self.offered(form, setting))

    def type(self, form: BenchForm, setting: BenchField, text: str) -> None:
        """It was typed; what is offered all the same is as good as not typed."""
        key = form.bench, setting.name
        if text.strip() == self.offered(form, setting):
            self._typed.pop(key, None)
        else:
            self._typed[key] = text

    def refused(self, form: BenchForm) -> str:
        """Why the bench cannot be run where it is to be, "" where it can."""
        return form.no_server if self.server.url else form.refused

    def order(self, form: BenchForm, model: str) -> BenchOrder:
        """All of it. model: of the engine."""
        settings = {setting.name: self.value(form, setting).strip() for setting in form.fields}
        server = self.server if self.server.url else None
        return BenchOrder(bench=form.bench, model=model, settings=settings, quick=self.quick, server=server)
