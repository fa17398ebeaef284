// Reads a page, and acts on its elements. Runs inside Chromium.
(() => {
  const held = window.__sixfold || (window.__sixfold = {nodes: [], fresh: true});

  const read = (most) => {
    held.nodes = [];
    let count = 0;
    const visit = (element) => {
      const style = getComputedStyle(element);
      const attributes = {};
      for (const one of element.attributes) attributes[one.name] = one.value;
      const key = held.nodes.push(element) - 1;
      const field = ['INPUT', 'TEXTAREA'].includes(element.tagName);
      const state = [
        field ? element.value : '',
        element.checked === true,
        element.tagName === 'OPTION' && element.selected,
        style.display !== 'none',
        style.visibility === 'visible',
      ];
      const children = [];
      for (const child of element.childNodes) {
        if (++count >= most) break;
        if (child.nodeType === Node.TEXT_NODE) children.push(child.data);
        else if (child.nodeType === Node.ELEMENT_NODE) children.push(visit(child));
      }
      return [element.localName, attributes, state, key, children];
    };
    const fresh = held.fresh;
    held.fresh = false;
    return {fresh, url: location.href, root: visit(document.documentElement)};
  };

  // Runs an action. True if the page will be left, as far as its own handlers let it.
  const leaving = (action) => {
    let leaves = false;
    const clicked = (event) => {
      const link = event.target.closest && event.target.closest('a[href]');
      if (!link || event.defaultPrevented || !link.protocol.startsWith('http')) return;
      const here = location.href.split('#')[0];
      leaves = leaves || !(link.hash || link.href.endsWith('#')) || link.href.split('#')[0] !== here;
    };
    const submitted = (event) => {
      const button = event.submitter;
      const method = (button && button.hasAttribute('formmethod'))
        ? button.formMethod : event.target.method;
      if (!event.defaultPrevented && method !== 'dialog') leaves = true;
    };
    window.addEventListener('click', clicked);
    window.addEventListener('submit', submitted);
    try { action(); } finally {
      window.removeEventListener('click', clicked);
      window.removeEventListener('submit', submitted);
    }
    return leaves;
  };

  const sameTab = (element) => {
    element.removeAttribute('target');
    element.removeAttribute('formtarget');
    element.removeAttribute('download');
    if (element.form) element.form.removeAttribute('target');
  };

  const click = (key) => leaving(() => {
    const element = held.nodes[key];
    sameTab(element);
    element.focus();
    element.click();
  });

  const submit = (key) => leaving(() => {
    sameTab(held.nodes[key]);
    held.nodes[key].requestSubmit();
  });

  const changed = (element) => {
    element.dispatchEvent(new Event('input', {bubbles: true}));
    element.dispatchEvent(new Event('change', {bubbles: true}));
  };

  const fill = ([key, text]) => {
    const element = held.nodes[key];
    element.focus();
    const prototype = element.tagName === 'TEXTAREA' ? HTMLTextAreaElement : HTMLInputElement;
    Object.getOwnPropertyDescriptor(prototype.prototype, 'value').set.call(element, text);
    changed(element);
  };

  const choose = ([key, option]) => {
    const chosen = held.nodes[option];
    chosen.selected = held.nodes[key].multiple ? !chosen.selected : true;
    changed(held.nodes[key]);
  };

  Object.assign(held, {read, click, submit, fill, choose});
})();
