"""A grammar's states, and the masks that are known in each: an automaton that is built while rows walk it.

A grammar engine needs microseconds to milliseconds for a mask, and several microseconds even to follow a row. So the states of a
grammar are kept as a graph: a token leads from one node to the next, and a mask that was made once serves every row that comes
to its node. Under a JSON schema the states are those of `json_states`, so that rows meet again however their texts differ. Under
any other grammar a state is the sequence of tokens so far. A row's matcher is asked only where a mask is not known, and takes
the row's tokens only then. Inside a string that the schema leaves free, most of that is not needed either (`string_masks`).
Knows tokens, masks and the engine behind them. Knows nothing of steps.

Legend: V vocabulary, W words of 32 tokens.
"""

from collections.abc import Hashable
from typing import Any

from quire.structured_output.backend import Backend, IntArray
from quire.structured_output.json_states import FREE, Frame, JsonState, Rules, go_on, round_counts
from quire.structured_output.string_masks import LEAVES, UNBOUNDED, StringMasks, has_token, split_text

_MOST_MASKS = 4096
"""Different masks that all grammars keep; 80 MB for a vocabulary of 150,000. A grammar forgets its states when there are more."""
_MOST_NODES = 20_000
_MOST_TEXTS = 4096
_DEEPEST = 64
"""Tokens from the beginning, of grammars that are no schemas: later states are hardly met twice."""
_LONGEST_LEXEME = 32
"""Bytes of a string that has to be kept as it is: longer ones are hardly met twice."""
_MOST_PROBES = 1024
"""Characters of a string that are looked ahead."""


class Text:
    """The inside of a string that the schema leaves free.

    Attributes:
        least, frontier: characters from which on, and up to which, it is like that.
        goes_on: whether the string may go on at the frontier, where it has to be looked at again.
    """

    __slots__ = ("base", "frontier", "goes_on", "least", "mask", "steps")

    def learn(self, strings: StringMasks, mask_W: IntArray, least: int, frontier: int, goes_on: bool) -> None:
        """What a mask says, the earlier in the string the better: it may have no room for everything that the string allows."""
        self.base, self.steps = strings.begin(mask_W)
        self.mask = strings.mask(self.base, UNBOUNDED)
        self.least, self.frontier, self.goes_on = least, frontier, goes_on


class KnownMasks:
    """What is known of a state, and of all states that differ in nothing that the next tokens can reach.

    Attributes:
        masks: by the characters that are left in a free string. Where the engine leaves but one text, it allows the first
            token of its usual spelling, which may depend on the token before: the first one seen serves all.
        forced: the tokens that follow for certain, by the token before, where that was asked for.
        visits: how often a mask was made.
    """

    __slots__ = ("forced", "is_forced", "masks", "visits")

    def __init__(self) -> None:
        self.masks: dict[int, IntArray] = {}
        self.forced: dict[int, list[int]] = {}
        self.is_forced = False
        self.visits = 0


class Node:
    """A state.

    Attributes:
        edges: by token: the next node, and characters of a free string that are behind it.
        aliases: tokens that lead where another one leads.
        state: of a JSON text; None of others.
        depth: tokens from the beginning of other texts.
        is_lasting: whether it may be met again.
        text: the free string that it is inside of.
        is_between: whether it is between two characters of that.
        full: where any token leads that brings the string to its frontier, once one has.
    """

    __slots__ = ("aliases", "depth", "edges", "full", "is_between", "is_lasting", "known", "state", "text")

    def __init__(self, state: JsonState | None, known: KnownMasks, depth: int = 0, *, is_lasting: bool = True) -> None:
        self.edges: dict[int, tuple[Node, int]] = {}
        self.aliases: dict[int, int] = {}
        self.known, self.state, self.depth, self.is_lasting = known, state, depth, is_lasting
        self.text: Text | None = None
        self.is_between = False
        self.full: tuple[Node, int] | None = None


class Position:
    """A row's place in the graph.

    Attributes:
        last: the token that led there.
        used: characters of the free string that it is in.
        skipped: those of them of which its matcher is not told, unless it has to be.
        was_masked: whether a mask was made for it that may not be kept: what comes next is as good as known to be allowed.
        matcher, pending: the engine's view of the row, None if it was never needed; and what it has not taken yet.
    """

    __slots__ = ("last", "matcher", "node", "pending", "skipped", "states", "used", "was_masked")

    def __init__(self, states: "States") -> None:
        self.states, self.node = states, states.root
        self.last = self.used = self.skipped = 0
        self.was_masked = False
        self.pending: list[int] = []
        self.matcher: Any = None


class States:
    """The states of one grammar.

    Args:
        backend, compiled: the engine, and the grammar that it compiled.
        rules: what `json_states` may forget; None: the grammar is no JSON schema, or nothing may be forgotten.
        strings: of the vocabulary.
        tokens: the bytes of each.
        ends: tokens that end a sequence.
    """

    def __init__(
        self,
        backend: Backend,
        compiled: Any,
        rules: Rules | None,
        strings: StringMasks,
        tokens: list[bytes],
        ends: frozenset[int],
    ) -> None:
        self.backend, self.compiled = backend, compiled
        self._rules, self._strings, self._tokens, self._ends = rules, strings, tokens, ends
        self._texts: dict[Hashable, Text] = {}
        self._nodes: dict[JsonState, Node] = {}
        self._forget()

    def _forget(self) -> None:
        """Begin anew. Rows go on from where they are."""
        for node in self._nodes.values():
            node.edges.clear()
            node.full = None
        self._nodes = {}
        self._known: dict[JsonState, KnownMasks] = {}
        self._rounded: dict[tuple[Frame, ...], tuple[Frame, ...]] = {}
        self._num_nodes = 0
        self.root = Node(None if self._rules is None else JsonState(), KnownMasks())

    def take(self, at: Position, token_id: int) -> bool:
        """Move a row by a token; whether the grammar allows it. A position that refused one is of no use any more."""
        node = at.node
        if node.is_between:
            text = node.text
            assert text is not None
            size = text.steps[token_id]
            if size != LEAVES and at.used + size < text.frontier:
                at.used += size
                at.skipped += size
                return True
            left = UNBOUNDED if text.goes_on else text.frontier - at.used
            if self._strings.num_chars(token_id) > left:
                return False
            if size == left and node.full is not None:
                at.pending += [self._strings.probe] * at.skipped
                return self._follow(at, token_id, node.full)
        edge = node.edges.get(node.aliases.get(token_id, token_id))
        if edge is None:
            return self._discover(at, token_id)
        return self._follow(at, token_id, edge)

    def _follow(self, at: Position, token_id: int, edge: tuple[Node, int]) -> bool:
        at.node, at.used = edge
        at.last, at.skipped = token_id, 0
        at.pending.append(token_id)
        return True

    def _discover(self, at: Position, token_id: int) -> bool:
        """Move a row by a token that no row has taken here before."""
        node, mask_W = at.node, self.mask(at)
        if mask_W is not None and not has_token(mask_W, token_id):
            return False
        used, stays = 0, False
        if token_id in self._ends:
            found = Node(None, KnownMasks(), is_lasting=False)
        elif node.state is None:
            found = self._new_child(node)
        elif (gone := self._go_on(node.state, token_id)) is not None:
            state, stays = gone
            if stays and node.is_between and node.text is not None and node.text.frontier < UNBOUNDED:
                at.pending += [self._strings.probe] * at.skipped
            found, used = self._arrive(state, at.used if stays else 0)
            if stays and node.is_between and node.text is not None and not node.text.goes_on:
                size = node.text.steps[token_id]
                if size != LEAVES and at.used + size == node.text.frontier:
                    node.full = found, used
        else:
            found = Node(None, KnownMasks(), is_lasting=False)
        at.pending.append(token_id)
        at.node, at.used, at.last, at.skipped = found, used, token_id, 0
        if mask_W is None and not at.was_masked and not self._catch_up(at):
            return False
        at.was_masked = False
        if found.is_lasting and not (stays and node.text is not None):
            node.edges[node.aliases.get(token_id, token_id)] = found, used
        return True

    def _new_child(self, node: Node) -> Node:
        is_lasting = node.is_lasting and node.depth < _DEEPEST
        if is_lasting:
            self._count_node()
        return Node(None, KnownMasks(), node.depth + 1, is_lasting=is_lasting)

    def _count_node(self) -> None:
        self._num_nodes += 1
        if self._num_nodes > _MOST_NODES:
            self._forget()

    def _go_on(self, state: JsonState, token_id: int) -> tuple[JsonState, bool] | None:
        token, lexeme = self._tokens[token_id], state.lexeme
        if state.is_in_string and b'"' not in token and b"\\" not in token and lexeme[-1:] != b"\\":
            return JsonState(state.frames, state.phase, lexeme + token, False, state.offset), True
        assert self._rules is not None
        return go_on(state, token, self._rules)

    def _arrive(self, state: JsonState, used: int) -> tuple[Node, int]:
        """The node of a state, and the characters behind it of the free string that it is in."""
        text, rest = None, b""
        if state.is_in_string:
            text = self._texts.get(self._place(state))
            if text is not None:
                more, rest = split_text(state.lexeme[1:])
                if used + more < text.least:
                    text = None
                else:
                    used += more
                    crosses = not rest and used >= text.frontier
                    offset = used if crosses else state.offset
                    state = JsonState(state.frames, state.phase, FREE[1:] + rest, False, offset)
                    if crosses:
                        return self._arrive(state, used)
        found = self._nodes.get(state)
        if found is None:
            found = self._new_node(state)
        if text is not None and found.text is None:
            self._set_text(found, text, not rest)
        return found, used

    def _place(self, state: JsonState) -> Hashable:
        """A key for the string that a state is inside of: equal for strings with equal rules."""
        return self._round(state.frames), state.is_in_key, state.offset

    def _round(self, frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
        found = self._rounded.get(frames)
        if found is None:
            assert self._rules is not None
            found = self._rounded[frames] = round_counts(frames, self._rules, self._strings.longest_token)
        return found

    def _new_node(self, state: JsonState) -> Node:
        if len(state.lexeme) > _LONGEST_LEXEME:
            return Node(state, KnownMasks(), is_lasting=False)
        self._count_node()
        rounded = JsonState(self._round(state.frames), *state[1:])
        found = self._nodes[state] = Node(state, self._known.setdefault(rounded, KnownMasks()))
        if not state.lexeme:
            found.aliases = self._strings.spaces
        return found

    def _set_text(self, node: Node, text: Text, is_between: bool) -> None:
        node.text, node.is_between = text, is_between
        if is_between:
            node.aliases = self._strings.exits

    def mask(self, at: Position) -> IntArray | None:
        """The mask of what may come next, if it is known. Rows with equal masks get one array, which must not be changed."""
        node = at.node
        if not node.is_between:
            return node.known.masks.get(self._variant(at))
        text = node.text
        assert text is not None
        left = text.frontier - at.used
        if text.goes_on or left >= self._strings.longest:
            return text.mask
        return self._strings.mask(text.base, left)

    def _variant(self, at: Position) -> int:
        """Under what a state's mask is kept."""
        node = at.node
        text = node.text
        if text is None:
            return 0
        most = self._strings.longest + 1
        return most if text.goes_on else min(text.frontier - at.used, most)

    def forced(self, at: Position) -> list[int]:
        """The tokens that come next for certain, as `Backend.forced`."""
        node = at.node
        if node.is_between or (node.known.masks and not node.known.is_forced):
            return []
        found = node.known.forced.get(at.last)
        if found is None:
            found = self.backend.forced(at.matcher) if self._catch_up(at) else []
            node.known.forced[at.last] = found
        return list(found)

    def room(self, at: Position, token_ids: list[int]) -> int:
        """How many of these tokens the grammar allows one after the other. The row stays where it is."""
        mask_W = self.mask(at)
        if mask_W is not None and not has_token(mask_W, token_ids[0]):
            return 0
        return self.backend.room(at.matcher, token_ids) if self._catch_up(at) else 0

    def give_pending(self, at: Position) -> tuple[Any, list[int]]:
        """A row's matcher, and what the caller has to let it take."""
        if at.matcher is None:
            at.matcher = self.backend.begin(self.compiled)
        pending, at.pending = at.pending, []
        return at.matcher, pending

    def _catch_up(self, at: Position) -> bool:
        """Let a row's matcher take what it does not know; whether it agrees."""
        matcher, pending = self.give_pending(at)
        return not pending or self.backend.take(matcher, pending)

    def learn(self, at: Position, mask_W: IntArray) -> str | None:
        """Keep the mask that a row's matcher made; why it cannot go on, if so."""
        why = self.backend.why_stuck(at.matcher)
        node, known = at.node, at.node.known
        at.was_masked = True
        if why is not None:
            return why
        state = node.state
        if state is not None and node.text is None and state.is_in_string:
            self._learn_text(at, state, mask_W)
        if not node.is_lasting or node.is_between:
            return None
        known.visits += 1
        is_rare = node.depth > 1 if state is None else state.is_in_string and node.text is None
        if not is_rare or known.visits > 1:
            if self._strings.num_kept >= _MOST_MASKS:
                self._forget()
            known.is_forced = self.backend.is_forced(at.matcher)
            known.masks[self._variant(at)] = self._strings.keep(mask_W)
        return None

    def _learn_text(self, at: Position, state: JsonState, mask_W: IntArray) -> None:
        """Find out whether a row is inside of a free string."""
        strings, rules, is_key = self._strings, self._rules, state.is_in_key
        if rules is None or (is_key and rules.names) or not strings.may_be_inside(mask_W, is_key=is_key):
            return
        more, rest = split_text(state.lexeme[1:])
        place, used = self._place(state), at.used + more
        known = self._texts.get(place)
        if rest or len(self._texts) > _MOST_TEXTS or (known is not None and known.least <= used):
            return
        left, goes_on = UNBOUNDED, False
        if rules.longest and not is_key:
            most = min(rules.longest + 1, _MOST_PROBES)
            left = self.backend.room(at.matcher, [strings.probe] * most)
            goes_on = left == most <= rules.longest
            left = UNBOUNDED if left == most > rules.longest else left
        frontier = min(used + left - (strings.longest if goes_on else 0), UNBOUNDED)
        if frontier > used and strings.is_inside(mask_W, left):
            text = self._texts.setdefault(place, Text())
            text.learn(strings, mask_W, used, frontier, goes_on)
            if not more:
                self._set_text(at.node, text, True)
