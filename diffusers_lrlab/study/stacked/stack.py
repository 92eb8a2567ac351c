"""The training loop of a stack: one computation for the networks of all runs; everything else belongs to each run."""

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...averaging.averages import averages_itself
from .member import Inputs, Member, draws_of
from .networks import clip, embed, gradients_of, own_parameters, predict, stack_parameters
from .steps import AVERAGING, LR, StackedAverages, batched_kind, batched_optimizers, rates_of

_VALIDATED_POINTS = 1000  # of each member in a pass, for any number of members


class Stack:
    """
    Runs side by side.

    Members have one architecture, batch size and objective; all that are not done are at the same update. AdamW and SGD are
    stepped as one [`BatchedOptimizer`], with `fuse` by default on a CPU; other optimizers take their own steps.
    """

    def __init__(self, members: list[Member], device: torch.device, fuse: bool | None = None):
        self.device = device
        self._fuse = device.type == "cpu" if fuse is None else fuse
        self.update = next((member.run.update for member in members if not member.is_done), members[0].run.update)
        self.sums = torch.zeros(3, len(members), device=device)
        self._draws_of = draws_of(members, device)
        for member in members:
            member.run.objective = self._draws_of[member].objective
        self._gather(sorted(members, key=batched_kind))

    def load(self, states: dict[Member, dict[str, Any]]) -> None:
        """Restores saved states of its members, and drops members that are done."""
        for member in self.members:
            if member in states:
                member.load_state_dict(states[member])
        self._gather(self.members)  # restored tensors are no views of the stack
        self._release_done()

    def _release_done(self) -> None:
        """Drops the members that are done."""
        done = [member for member in self.members if member.is_done]
        if done:
            for member in done:
                member.take_out()
            left = [index for index, member in enumerate(self.members) if member not in done]
            self.sums = self.sums[:, left]
            self._gather([self.members[index] for index in left])

    def _gather(self, members: list[Member]) -> None:
        self.members = members
        if not members:
            return
        self.weights = stack_parameters(member.run.model.parameters() for member in members)
        for index, member in enumerate(members):
            member.sums = self.sums[:, index]
            for parameter, values in zip(member.run.model.parameters(), own_parameters(self.weights, index), strict=True):
                parameter.data, parameter.grad = values, None
        self.rates = rates_of(members)
        self._rates_on_device = self.rates.to(self.device)
        self.optimizers = [*batched_optimizers(members, self.weights, self._fuse)]
        self.averages = StackedAverages(members, self.weights, self.rates)
        self._stepping = [index for index, member in enumerate(members) if not batched_kind(member)]
        self._reacting = [index for index, member in enumerate(members) if member.run.feedback]
        self._observing = [index for index, member in enumerate(members) if member.run.objective.follows_losses]
        norms = [member.run.config.max_grad_norm or math.inf for member in members]
        self.max_norms = torch.tensor(norms, device=self.device, dtype=self.weights[0].dtype)
        sources = [self._draws_of[member] for member in members]
        self._sources = list(dict.fromkeys(sources))
        self._source_of = torch.tensor([self._sources.index(source) for source in sources], device=self.device)
        self._first_of = torch.tensor([sources.index(source) for source in self._sources], device=self.device)
        self._logging = {member.run.config.logging_steps for member in members}
        self._validating = {member.run.plan.validation_updates for member in members}
        self._end = min(member.run.plan.num_updates for member in members)
        self._note_events()

    def _note_events(self) -> None:
        """Finds the next update after which losses are read; the others leave everything on the device."""
        self._check = min(self._end, *(self.update - self.update % steps + steps for steps in self._validating))
        self._event = min(self._check, *(self.update - self.update % steps + steps for steps in self._logging))

    def do_update(self) -> None:
        started, own = time.perf_counter(), sum(self.members[index].run.training_seconds for index in self._stepping)
        for index in self._reacting:  # schedules that follow a metric
            run = self.members[index].run
            for rates in (self.rates, self._rates_on_device):
                rates[self.update, LR, index] = run.current_lr * (1.0 if run.lr_factor is None else run.lr_factor)
        for member in self.members if self.update + 1 == self._check else ():
            member.check_rates()
        inputs, rates = self._draw(), self._rates_on_device[self.update]
        losses, gradients = self._compute(inputs)
        for optimizer in self.optimizers:
            optimizer.step(gradients, rates)
        for index in self._stepping:
            self.members[index].take_step(own_parameters(gradients, index))
        self.averages.step(self.update, rates)
        for index in self._observing:
            self.members[index].run.objective.observe(inputs.timesteps[index], losses[index])
        self.update += 1
        own = sum(self.members[index].run.training_seconds for index in self._stepping) - own
        share = (time.perf_counter() - started - own) / len(self.members)
        for member in self.members:
            member.run.update, member.run.training_seconds = self.update, member.run.training_seconds + share
        for index in self._reacting:
            if feedback := self.members[index].run.feedback:
                feedback.advance()

    def _draw(self) -> Inputs:
        """Each source draws once; members pick the draws of their source."""
        drawn = [source.draw(self.update) for source in self._sources]
        points, timesteps, noise = (
            torch.stack(parts).index_select(0, self._source_of) for parts in zip(*(each[:3] for each in drawn), strict=True)
        )
        weights = None
        if any(source.objective.is_weighted for source in self._sources):
            ones = torch.ones(points.shape[1], device=self.device)
            weights = torch.stack([ones if own is None else own for *_, own in drawn])[self._source_of]
        return Inputs(points, timesteps, noise, weights)

    def _compute(self, drawn: Inputs) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """The unweighted losses `(members, batch)`, and the clipped gradients of their weighted means."""
        points, timesteps, noise, weights = drawn
        process, flat = self.members[0].run.process, (points.flatten(0, 1), noise.flatten(0, 1), timesteps.flatten())
        noisy = process.add_noise(*flat).view_as(points)
        # Sines and cosines cost much: members with equal draws share them.
        times = process.model_time(timesteps[self._first_of])
        embedding = embed(self.members[0].run.model, noisy[self._first_of], times).index_select(0, self._source_of)
        inputs: list[torch.Tensor] = []
        prediction = predict(self.weights, embedding, inputs).requires_grad_()
        losses = process.prediction_losses(prediction.flatten(0, 1), *flat).view(len(points), -1)
        means = (losses if weights is None else losses * weights).mean(1)
        gradients = gradients_of(self.weights, inputs, *torch.autograd.grad(means.sum(), prediction))
        norms = clip(gradients, self.max_norms)
        self.sums += torch.stack([means.detach(), norms.to(means), torch.ones_like(means)])
        return losses.detach(), gradients

    def updates(self) -> Iterator[int]:
        """Trains until every member is done; yields the number of advanced members after each update."""
        while self.members:
            self.do_update()
            num_advanced = len(self.members)
            if self.update == self._event:
                at_check = self.update == self._check
                self._read_sums()
                if at_check:
                    self._validate()
                self._note_events()
                self._release_done()
            yield num_advanced

    def _read_sums(self) -> None:
        """Adds losses to the curves at logging points, where divergence is noticed too."""
        runs = [member.run for member in self.members]
        logging = [index for index, run in enumerate(runs) if run.at_interval(run.config.logging_steps)]
        if not logging:
            return
        losses, norms, counts = self.sums[:, logging].double().cpu()
        columns = (
            (losses / counts).tolist(),
            (norms / counts).tolist(),
            *self.rates[self.update - 1][:AVERAGING, logging].tolist(),
        )
        for index, loss, norm, lr, momentum in zip(logging, *columns, strict=True):
            member, has_momentum = self.members[index], runs[index].current_momentum is not None
            member.curves.add_loss(self.update - 1, loss, lr, momentum if has_momentum else None)
            if not math.isfinite(loss + norm):
                member.diverge()
        self.sums[:, logging] = 0.0

    def _validate(self) -> None:
        """Validation losses of the members that are due, together except where the optimizer averages the weights itself."""
        due = [member for member in self.members if member.run.validation is not None and not member.error]
        due = [member for member in due if member.run.at_interval(member.run.plan.validation_updates)]
        together: dict[int, list[Member]] = {}
        for member in due:
            alone = id(member) if averages_itself(member.run.optimizer) else -len(member.run.data.held_out)
            together.setdefault(alone, []).append(member)
        for members in together.values():
            started = time.perf_counter()
            if averages_itself(members[0].run.optimizer):
                own = {name: float(values.mean()) for name, values in members[0].run.validation_losses().items()}
                members[0].add_validation(own)
            else:
                self._validate_together(members)
            for member in members:
                member.run.evaluation_seconds += (time.perf_counter() - started) / len(members)

    @torch.no_grad()
    def _validate_together(self, members: list[Member]) -> None:
        indices, process = [self.members.index(member) for member in members], members[0].run.process
        held_out = [validation for member in members if (validation := member.run.validation) is not None]
        parts = [(validation.batch.data, validation.noise, validation.timesteps) for validation in held_out]
        points, noise, timesteps = (torch.stack(part) for part in zip(*parts, strict=True))
        networks = [[values[indices] for values in stacked] for stacked in (self.weights, self.averages.values)]
        losses: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        for start in range(0, points.shape[1], _VALIDATED_POINTS):
            part = slice(start, start + _VALIDATED_POINTS)
            flat = (points[:, part].flatten(0, 1), noise[:, part].flatten(0, 1), timesteps[:, part].flatten())
            noisy = process.add_noise(*flat).unflatten(0, (len(members), -1))
            embedding = embed(members[0].run.model, noisy, process.model_time(timesteps[:, part]))
            for parameters, own in zip(networks, losses, strict=True):
                prediction = predict(parameters, embedding)
                own.append(process.prediction_losses(prediction.flatten(0, 1), *flat).view(len(members), -1))
        found = [torch.cat(own, 1).double().cpu().numpy().mean(1).tolist() for own in losses]
        for member, raw, averaged in zip(members, *found, strict=True):
            ema = {} if member.run.average is None else {"validation_loss_ema": averaged}
            member.add_validation({"validation_loss": raw, **ema})
